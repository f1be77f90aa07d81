"""B1: LoRA on lm_head trains, beside TRL's trainers over the full logits of the PEFT model.

TRL itself refuses such a model; its oracle here is its own trainer without the refusal, with a
head that makes all logits through the model's modules.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import methods
import oracle
import parity
import pytest
import tiny
import torch
import trl
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, rloo_trainer, sft_trainer
from trl.trainer.utils import FusedCausalLMOutput

import lowpeak_trainers
from lowpeak_trainers.seam import heads_from

pytestmark = [
    # peft saves the base weight of a head with an adapter beside the adapter, and says so
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True.*:UserWarning"),
]
MODULES = (sft_trainer, dpo_trainer, kto_trainer, grpo_trainer, rloo_trainer)
HEAD = {"r": 4, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
LORA = LoraConfig(**HEAD)


class NoLayer:
    """Nothing is an instance of it."""


def full_logits_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
    """TRL's protocol over the logits that the model itself makes."""
    own = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        *args, fused_lm_head=False, labels=None, num_items_in_batch=None, **arguments
    ):  # fmt: skip
        if not fused_lm_head:
            return own(*args, labels=labels, **arguments)
        arguments["use_cache"] = False
        z = own(*args, **arguments).logits[:, :-1].float() / temperature
        labels = labels[:, 1:]
        mask = labels != -100
        index = labels.clamp(min=0).unsqueeze(-1)
        log_p = z.log_softmax(-1)
        values = {
            "log_probs": log_p.gather(-1, index).squeeze(-1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "mean_logits": z.mean(-1).detach(),
            "is_top1": (z.argmax(-1) == labels).float(),
        }
        values = {name: torch.where(mask, value, 0.0) for name, value in values.items()}
        divisor = mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -values["log_probs"].sum() / divisor
        values["is_top1"] = values["is_top1"].bool()
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **values)

    model.forward = forward


@contextmanager
def full_logits():
    """TRL's trainers built inside use `full_logits_head`, and take any adapter."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "add_fused_lm_head", full_logits_head)
            patch.setattr(module, "BaseTunerLayer", NoLayer)
        yield


def assert_same_training(method, folder, model=tiny.llama, **keywords):
    """Equal logs of all steps, equal gradients of the first, and a head whose adapter moves.

    Later gradients follow from parameters in which Adam has made steps of roundings near zero.
    """
    records = [oracle.GradientRecord(), oracle.GradientRecord()]
    before = {}

    def stock():
        with full_logits():
            return methods.build(
                trl, method, folder, model=model(), callbacks=[records[0]], **keywords
            )

    def ours():
        trainer = methods.build(
            lowpeak_trainers, method, folder, model=model(), callbacks=[records[1]], **keywords
        )
        before.update(adapters(trainer))
        return trainer

    _, trainer = parity.assert_parity(stock, ours, online=method in methods.ONLINE)
    wanted, found = (record.steps[0] for record in records)
    oracle.assert_same_gradients(found, wanted)
    after = adapters(trainer)
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert {name for name in moved if "lm_head" in name} == {
        name for name in wanted if "lm_head" in name
    }
    assert sum("lm_head" in name for name in moved) >= 2


def adapters(trainer):
    """Copies of the parameters of the adapters, by name."""
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if "lora_" in name}


@pytest.mark.parametrize("method", methods.METHODS)
def test_b1_trains_as_with_full_logits(method, tmp_path, caplog):
    """The reference of DPO and KTO is the model without its adapter."""
    with caplog.at_level(logging.INFO, "lowpeak"):
        assert_same_training(method, tmp_path, peft_config=LORA)
    assert "fused LM head on: equals the model's own" in caplog.text
    assert "own head runs on a tile" not in caplog.text


@pytest.mark.parametrize("options", [
    {"use_rslora": True, "lora_alpha": 3}, {"use_dora": True},
], ids=["rslora", "dora"])  # fmt: skip
def test_b1_other_adapters(options, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lowpeak"):
        assert_same_training("SFT", tmp_path, peft_config=LoraConfig(**HEAD, **options))
    assert ("own head runs on a tile" in caplog.text) == ("use_dora" in options)


def test_b1_tied_embedding(tmp_path):
    tied = functools.partial(tiny.llama, tie_word_embeddings=True)
    assert_same_training("SFT", tmp_path, model=tied, peft_config=LORA)


def test_b1_reference_adapter_of_dpo(tmp_path):
    """A PeftModel: TRL copies its adapter, and the copy is the reference."""

    def model():
        torch.manual_seed(3)
        return get_peft_model(tiny.llama(), LORA)

    with full_logits():
        built = methods.build(trl, "DPO", tmp_path, model=model(), peft_config=None)
    assert "ref" in built.model.peft_config
    assert_same_training("DPO", tmp_path, model=model, peft_config=None)


def test_b1_grpo_with_a_reference(tmp_path):
    assert_same_training("GRPO", tmp_path, peft_config=LORA, options={"beta": 0.1})


def test_b1_saved_and_loaded(tmp_path):
    trainer = methods.build(lowpeak_trainers, "SFT", tmp_path, peft_config=LORA)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny.llama(), tmp_path / "adapter")
    device = trainer.model.device
    loaded.to(device).eval()
    trainer.model.eval()
    tokens = torch.arange(3, 11, device=device).unsqueeze(0)
    with torch.no_grad():
        wanted, found = trainer.model(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    torch.testing.assert_close(found, wanted)
    merged = loaded.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-4)


def test_stock_trainers_in_enabled_take_it(tmp_path):
    with lowpeak_trainers.enabled():
        trainer = methods.build(trl, "SFT", tmp_path, peft_config=LORA)
    trainer.train()
    assert parity.has_lowpeak_head(trainer)


REFUSED = "Applying a PEFT adapter to `lm_head` is not supported"


@pytest.mark.parametrize("method", methods.METHODS)
def test_trl_refuses_it_as_before(method, tmp_path):
    """In TRL's own trainers, before and after one of lowpeak was built, and with our head off."""
    with pytest.raises(ValueError, match=REFUSED):
        methods.build(trl, method, tmp_path, peft_config=LORA)
    methods.build(lowpeak_trainers, method, tmp_path, peft_config=LORA)
    with pytest.raises(ValueError, match=REFUSED):
        methods.build(trl, method, tmp_path, peft_config=LORA)
    off = {"fused_lm_head": False}
    with pytest.raises(ValueError, match=REFUSED):
        methods.build(lowpeak_trainers, method, tmp_path, peft_config=LORA, options=off)


def test_only_the_building_thread_overlooks_an_adapter():
    """And only where its heads take adapters along; afterwards the class is PEFT's again."""
    head = get_peft_model(tiny.llama(), LORA).get_output_embeddings()

    def seen():
        return isinstance(head, sft_trainer.BaseTunerLayer)

    with heads_from(lambda *_: None, takes_adapters=True):
        assert not seen()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(seen).result()
        with heads_from(lambda *_: None):
            assert seen()
    assert sft_trainer.BaseTunerLayer is BaseTunerLayer


def test_switched_off_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPEAK_DISABLE", "head")
    with pytest.raises(ValueError, match=REFUSED):
        methods.build(lowpeak_trainers, "SFT", tmp_path, peft_config=LORA)


def test_float32_copies_of_the_head_are_refused(tmp_path):
    """TRL replaces the head's forward then, adapter and all."""
    model = tiny.llama()
    with pytest.raises(ValueError, match=REFUSED):
        methods.build(
            lowpeak_trainers, "GRPO", tmp_path, model=model, peft_config=LORA,
            options={"cast_lm_head_to_fp32": True},
        )  # fmt: skip
