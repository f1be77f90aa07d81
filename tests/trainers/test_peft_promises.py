"""Adapters of all kinds train as under stock TRL, with right gradients, and merge."""

from __future__ import annotations

import methods
import oracle
import parity
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import lowpeak_trainers

# A fresh adapter leaves the policy equal to the reference, whose rewards then are rounding errors.
RANDOM = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
TIED = {
    **RANDOM,
    "modules_to_save": ["embed_tokens", "lm_head"],
    "ensure_weight_tying": True,
    "task_type": "CAUSAL_LM",
}
ADAPTERS = {
    "lora": LoraConfig(**RANDOM),
    "rslora": LoraConfig(**RANDOM, use_rslora=True),
    "dora": LoraConfig(**RANDOM, use_dora=True),
    "saved_head": LoraConfig(**RANDOM, modules_to_save=["lm_head"]),
    "tied_head": LoraConfig(**TIED),
    "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}
MERGEABLE = [name for name in ADAPTERS if name != "prompt_tuning"]
OFFLINE = [
    pytest.param(method, marks=pytest.mark.slow if method == "KTO" else ())
    for method in methods.METHODS
    if method not in methods.ONLINE
]


def model_for(adapter):
    return tiny.llama(tie_word_embeddings=adapter == "tied_head")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", OFFLINE)
def test_adapter_trains_as_under_trl(method, adapter, tmp_path):
    methods.assert_parity(
        method, tmp_path, model=lambda: model_for(adapter), peft_config=ADAPTERS[adapter]
    )


def logits(model):
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        return model.cpu().eval()(input_ids=ids).logits


@pytest.mark.parametrize("adapter", MERGEABLE)
def test_merged_model_is_the_adapter_model(adapter, tmp_path):
    """Trained, saved, loaded, merged, exported: always the same logits; the base is left behind."""
    trainer = methods.build(
        lowpeak_trainers,
        "SFT",
        tmp_path,
        model=model_for(adapter),
        peft_config=ADAPTERS[adapter],
        options={"learning_rate": 0.01},
    )
    untrained = logits(trainer.model)
    trainer.model.to(trainer.args.device)
    trainer.train()
    wanted = logits(trainer.model)
    assert (wanted - untrained).abs().max() > 0.1
    trainer.save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(model_for(adapter), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-4)
    merged = trainer.model.merge_and_unload()
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-5, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert exported.state_dict().keys() == model_for(adapter).state_dict().keys()
    torch.testing.assert_close(logits(exported), logits(merged), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("adapter", ["saved_head", "tied_head", "dora"])
def test_b4_gradients_of_adapter_and_saved_modules(adapter, tmp_path):
    """One SFT step; the oracle scores each document alone with the PEFT model in float64."""
    lengths = [3, 30, 7, 12]
    record = oracle.GradientRecord()
    trainer = methods.build(
        lowpeak_trainers,
        "SFT",
        tmp_path,
        model=model_for(adapter),
        peft_config=ADAPTERS[adapter],
        train_dataset=tiny.documents(lengths),
        options={"max_steps": 1, "max_grad_norm": 1e9},
        callbacks=[record],
    )
    twin = get_peft_model(model_for(adapter), ADAPTERS[adapter])
    twin.load_state_dict(trainer.model.state_dict())
    trainer.train()
    twin = oracle.in_float64(twin)
    targets = sum(lengths) - len(lengths)
    loss = (
        -sum(oracle.log_probs(twin, ids).sum() for ids in tiny.documents(lengths)["input_ids"])
        / targets
    )
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(twin))
    assert any("lora_A" in name for name in record.steps[0])
    if adapter != "dora":
        assert any("modules_to_save" in name for name in record.steps[0])


def test_b4_tied_copies_stay_one(tmp_path):
    trainer = methods.build(
        lowpeak_trainers,
        "SFT",
        tmp_path,
        model=model_for("tied_head"),
        peft_config=ADAPTERS["tied_head"],
    )
    trainer.train()
    base = trainer.model.get_base_model()
    head = base.lm_head.modules_to_save["default"].weight
    assert head is base.model.embed_tokens.modules_to_save["default"].weight
    original = model_for("tied_head").lm_head.weight
    assert not torch.equal(head.cpu(), original)
    merged = trainer.model.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.equal(merged.lm_head.weight, head)


def test_prompt_tuning_saves_and_loads(tmp_path):
    trainer = methods.build(
        lowpeak_trainers, "SFT", tmp_path, peft_config=ADAPTERS["prompt_tuning"]
    )
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny.llama(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=1e-5, atol=1e-4)


QUANTIZED = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4bit_double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8bit": {"load_in_8bit": True},
}


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("base", QUANTIZED)
@pytest.mark.parametrize("method", OFFLINE)
def test_qlora_trains_as_under_trl(method, base, tmp_path):
    """TRL keeps adapters on a quantised base in bfloat16: 1e-2 is about three of its roundings."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    # blocks of 64 values are quantised together
    path = tiny.save(tiny.llama(hidden_size=64), tmp_path / "model")
    trainers = [
        methods.build(
            package,
            method,
            tmp_path,
            model=path,
            peft_config=LoraConfig(**RANDOM),
            quantization_config=BitsAndBytesConfig(**QUANTIZED[base]),
        )
        for package in methods.PACKAGES.values()
    ]
    for trainer in trainers:
        torch.manual_seed(3)
        trainer.train()
    assert parity.has_lowpeak_head(trainers[1])
    parity.assert_same_logs(trainers[1], trainers[0], tolerance=1e-2)
