"""What TRL's trainers do beyond a loss goes on working, with the numbers of stock TRL."""

from __future__ import annotations

import parity
import pytest
import tiny
import torch
import trl
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig

import lowpeak_trainers

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
PEFT = {
    "modules_to_save": LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    ),
    # The self-test of the head must leave the random state of the dropout alone.
    "dropout": LoraConfig(
        r=4, target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False
    ),
    "all_linear": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix_tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def pair(method):
    """(trainer, config) of TRL and of lowpeak for one method."""
    return [
        (getattr(package, f"{method}Trainer"), getattr(package, f"{method}Config"))
        for package in (trl, lowpeak_trainers)
    ]


def assert_parity(method, folder, *, online=False, model=tiny.llama, options=None, **keywords):
    """Five equal steps of `method`; `options` go to the config, other keywords to the trainer.

    DPO without adapters gets another reference model: with equal ones the rewards are 0 but for
    rounding, and which of two is the larger says nothing.
    """

    def build(trainer, config):
        if method == "DPO" and "peft_config" not in keywords:
            keywords["ref_model"] = model(seed=1)
        return trainer(
            model=model(),
            args=config(**parity.settings(folder, **(options or {}))),
            processing_class=tiny.tokenizer(),
            **keywords,
        )

    stock, ours = pair(method)
    return parity.assert_parity(lambda: build(*stock), lambda: build(*ours), online=online)


OPTIONS = {
    # It passes a cache, which checkpointing does not allow.
    "prefix_tuning": {"gradient_checkpointing": False},
    # Dropout masks are drawn for the tokens of the layout, so the padded one.
    "dropout": {"padding_free": False},
}


@pytest.mark.parametrize("adapter", PEFT)
def test_sft_with_peft(adapter, tmp_path):
    assert_parity(
        "SFT",
        tmp_path,
        options=OPTIONS.get(adapter, {}),
        train_dataset=tiny.documents(LENGTHS),
        peft_config=PEFT[adapter],
    )


@pytest.mark.parametrize("adapter", ["modules_to_save", "prompt_tuning"])
def test_dpo_with_peft(adapter, tmp_path):
    stock, ours = assert_parity(
        "DPO", tmp_path, train_dataset=tiny.preferences(PAIRS), peft_config=PEFT[adapter]
    )
    assert stock.ref_model is ours.ref_model is None


def reward(completion_ids, **kwargs):
    """Reward almost without ties."""
    return [float(sum(i * t for i, t in enumerate(ids, 1)) % 17) for ids in completion_ids]


ONLINE = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}


@pytest.mark.parametrize("adapter", ["modules_to_save", "prompt_tuning"])
def test_grpo_with_peft(adapter, tmp_path):
    stock, ours = assert_parity(
        "GRPO",
        tmp_path,
        online=True,
        options={**ONLINE, "beta": 0.04},
        reward_funcs=reward,
        train_dataset=tiny.prompts(LENGTHS),
        peft_config=PEFT[adapter],
    )
    assert stock.ref_model is ours.ref_model is None


@pytest.mark.parametrize("method", ["SFT", "DPO", "GRPO"])
def test_mixture_of_experts(method, tmp_path):
    data = {
        "SFT": {"train_dataset": tiny.documents(LENGTHS)},
        "DPO": {"train_dataset": tiny.preferences(PAIRS)},
        "GRPO": {
            "train_dataset": tiny.prompts(LENGTHS),
            "reward_funcs": reward,
            "online": True,
            "options": ONLINE,
        },
    }[method]
    stock, _ = assert_parity(method, tmp_path, model=tiny.mixtral, **data)
    assert stock.state.log_history[0]["aux_loss"] > 0


def test_tied_embeddings(tmp_path):
    assert_parity(
        "SFT",
        tmp_path,
        model=lambda: tiny.llama(tie_word_embeddings=True),
        train_dataset=tiny.documents(LENGTHS),
    )


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_evaluates_between_steps(loss_type, tmp_path):
    stock, _ = assert_parity(
        "SFT",
        tmp_path,
        options={"eval_strategy": "steps", "eval_steps": 2, "loss_type": loss_type},
        train_dataset=tiny.documents(LENGTHS),
        eval_dataset={
            "short": tiny.documents([3, 4], seed=5),
            "long": tiny.documents([30], seed=6),
        },
    )
    evaluations = [entry for entry in stock.state.log_history if "eval_long_loss" in entry]
    assert len(evaluations) >= 2


def test_dpo_with_weighting_and_eval(tmp_path):
    assert_parity(
        "DPO",
        tmp_path,
        options={
            "use_weighting": True,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "precompute_ref_log_probs": True,
        },
        train_dataset=tiny.preferences(PAIRS),
        eval_dataset=tiny.preferences(PAIRS[:3], seed=9),
    )


@pytest.mark.parametrize("checkpointing", [True, False])
def test_generation_after_training_is_that_of_a_fresh_model(checkpointing, tmp_path):
    trainer, config = pair("SFT")[1]
    trained = trainer(
        model=tiny.llama(),
        args=config(**parity.settings(tmp_path, gradient_checkpointing=checkpointing)),
        train_dataset=tiny.documents(LENGTHS),
        processing_class=tiny.tokenizer(),
    )
    trained.train()
    assert trained.model.is_gradient_checkpointing == checkpointing
    fresh = tiny.llama()
    fresh.load_state_dict(trained.model.state_dict())
    ids = torch.tensor([[7, 8, 9]])
    texts = [
        model.cpu().eval().generate(ids, max_new_tokens=8, do_sample=False).tolist()
        for model in (trained.model, fresh)
    ]
    assert texts[0] == texts[1]


def test_checkpointing_is_on_by_default(tmp_path):
    trainer, config = pair("SFT")[1]
    built = trainer(
        model=tiny.llama(),
        args=config(**parity.settings(tmp_path)),
        train_dataset=tiny.documents(LENGTHS),
        processing_class=tiny.tokenizer(),
    )
    built.train()
    assert built.args.gradient_checkpointing
    assert built.model.is_gradient_checkpointing


def test_small_scratch_changes_no_number(tmp_path):
    """One token of float32 logits needs 512 bytes here, so the head works in very small tiles."""
    trainer, config = pair("SFT")[1]

    def build(scratch):
        return trainer(
            model=tiny.llama(),
            args=config(**parity.settings(tmp_path, lm_head_scratch_bytes=scratch)),
            train_dataset=tiny.documents(LENGTHS),
            processing_class=tiny.tokenizer(),
        )

    parity.assert_parity(lambda: build(None), lambda: build(1 << 16))


@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_mixed_precision(method, tmp_path):
    """float32 weights under bfloat16 autocast, TRL's default: 5e-2 is six roundings of bfloat16."""
    data = {"SFT": tiny.documents(LENGTHS), "DPO": tiny.preferences(PAIRS)}[method]
    losses = []
    for trainer, config in pair(method):
        trained = trainer(
            model=tiny.llama(),
            args=config(**parity.settings(tmp_path, bf16=True)),
            train_dataset=data,
            processing_class=tiny.tokenizer(),
            **({"ref_model": tiny.llama(seed=1)} if method == "DPO" else {}),
        )
        trained.train()
        losses.append([entry["loss"] for entry in trained.state.log_history[: parity.STEPS]])
    assert len(losses[0]) == parity.STEPS
    assert losses[1] == pytest.approx(losses[0], rel=5e-2)


def test_cast_head_of_a_bfloat16_model(tmp_path):
    """GRPO's cast_lm_head_to_fp32: the head is float32, the rest bfloat16."""
    path = tiny.save(tiny.llama().bfloat16(), tmp_path / "model")
    record = parity.CompletionRecord()
    logs = []
    for (trainer, config), use_record in zip(
        pair("GRPO"), (record.record, record.replay), strict=True
    ):
        built = trainer(
            model=path,
            reward_funcs=reward,
            args=config(
                **parity.settings(
                    tmp_path,
                    max_steps=1,
                    cast_lm_head_to_fp32=True,
                    beta=0.04,
                    model_init_kwargs={"dtype": "bfloat16"},
                    **ONLINE,
                )
            ),
            train_dataset=tiny.prompts(LENGTHS),
            processing_class=tiny.tokenizer(),
        )
        assert built.model.lm_head.weight.dtype == torch.float32
        use_record(built)
        built.train()
        logs.append(built.state.log_history[0])
    for name in ("loss", "entropy", "kl"):
        # bfloat16 layers round otherwise without padding
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-3, abs=1e-5)
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=1e-2)
