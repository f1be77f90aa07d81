"""share_prompts=True in the trainers: TRL's numbers, with each prompt computed once."""

from __future__ import annotations

import logging

import methods
import oracle
import parity
import pytest
import tiny
import trl
from peft import LoraConfig
from transformers import AttentionInterface, AttentionMaskInterface

import lowpeak_trainers
from lowpeak.attention.forward import lowpeak_attention
from lowpeak.attention.pattern import lowpeak_mask

# Prompts of 20 to 32 tokens and short completions.
PAIRS = [(24, 6, 3), (20, 2, 9), (32, 11, 5), (29, 4, 4)] * 4
PROMPTS = [24, 32, 20, 29] * 3
METHODS = [
    pytest.param(method, marks=pytest.mark.slow if method == "KTO" else ())
    for method in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")
]


def data_of(method):
    """A data set in which prompts are most of the tokens."""
    if method in methods.ONLINE:
        return tiny.prompts(PROMPTS)
    if method == "SFT":  # two answers to each prompt
        data = tiny.preferences(PAIRS).rename_column("chosen", "completion")
        return data.remove_columns("rejected").select([i // 2 for i in range(32)])
    if method == "KTO":
        return tiny.judged([pair[:2] for pair in PAIRS], [True, False, True, False] * 4)
    return tiny.preferences(PAIRS)


def build(package, method, folder, *, model=None, options=None, **keywords):
    if method == "Reward":
        return package.RewardTrainer(
            model=tiny.reward_model(),
            args=package.RewardConfig(**parity.settings(folder, **(options or {}))),
            train_dataset=data_of(method),
            processing_class=tiny.tokenizer(),
        )
    return methods.build(
        package,
        method,
        folder,
        model=model,
        options=options,
        **{"train_dataset": data_of(method), **keywords},
    )


def rows_of(trainer):
    """What the backbone of the trainer's model is given from now on, call by call."""
    seen = []
    model = trainer.accelerator.unwrap_model(trainer.model)
    backbone = getattr(model, "base_model", model)
    backbone = backbone.model.model if hasattr(backbone, "peft_config") else backbone
    backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    return seen


def assert_follows_trl(method, folder, *, options=None, **keywords):
    """Five equal steps under TRL and with shared prompts; returns the calls of our backbone."""
    calls = []

    def ours():
        trainer = build(
            lowpeak_trainers,
            method,
            folder,
            options={**(options or {}), "share_prompts": True},
            **keywords,
        )
        calls.append(rows_of(trainer))
        return trainer

    stock, our = parity.train_both(
        lambda: build(trl, method, folder, options=options, **keywords),
        ours,
        online=method in methods.ONLINE,
    )
    parity.assert_same_logs(our, stock)
    assert any("shared_prefixes" in call for call in calls[0])
    return calls[0]


@pytest.mark.parametrize("method", METHODS)
def test_follows_trl(method, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    options = {}
    if method == "SFT":
        # Batches of 4 in which each prompt comes twice. At a rate of 1e-3 the second loss of a run
        # that is padding-free alone is 5e-6 off already.
        options = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
        options["learning_rate"] = 1e-4
    follows = assert_follows_trl_in_the_reference if method == "KTO" else assert_follows_trl
    follows(method, tmp_path, options=options)
    assert f"shared prompts: on in {method}Trainer" in caplog.text


def assert_follows_trl_in_the_reference(method, folder, *, options):
    """KTO has each prompt twice in the reference's forward only, which has both completions."""
    calls = []

    def ours():
        trainer = build(
            lowpeak_trainers, method, folder, options={**options, "share_prompts": True}
        )
        reference = trainer.accelerator.unwrap_model(trainer.ref_model)
        reference.model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
        )
        return trainer

    stock, our = parity.train_both(lambda: build(trl, method, folder, options=options), ours)
    parity.assert_same_logs(our, stock)
    assert any("shared_prefixes" in call for call in calls)


def tokens(calls):
    """Tokens that the packed calls computed, and those they did not need to."""
    packed = [call for call in calls if "cu_seq_lens_q" in call]
    shared = [call["shared_prefixes"] for call in packed if "shared_prefixes" in call]
    return (
        sum(call["input_ids"].numel() for call in packed),
        sum(int(prefixes[:, 2].sum()) for prefixes in shared),
    )


def test_dpo_computes_a_prompt_once_a_pair(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    options = {"share_prompts": True, "max_steps": 4}  # each pair once
    trainer = build(lowpeak_trainers, "DPO", tmp_path, options=options)
    calls = rows_of(trainer)
    trainer.train()
    # the completions end with a token of their own
    both = sum(2 * prompt + chosen + rejected + 2 for prompt, chosen, rejected in PAIRS)
    # the last of a prompt predicts the completion, and is each row's own
    spared = sum(prompt - 1 for prompt, _, _ in PAIRS)
    assert tokens(calls) == (both - spared, spared)
    lines = [r.getMessage() for r in caplog.records if "of the first batch" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("shared prompts: ")


def test_grpo_computes_a_prompt_once_a_group(tmp_path):
    options = {
        "share_prompts": True,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    }
    prompt, completion = 24, [7, 8, 9, 10, 11]
    data = tiny.prompts([prompt] * 12)
    trainer = build(lowpeak_trainers, "GRPO", tmp_path, options=options, train_dataset=data)
    parity.script_completions(trainer, [completion] * 8, tiny.PAD)
    calls = rows_of(trainer)
    trainer.train()
    # 3 steps with 2 groups of 4
    spared = 3 * 2 * 3 * (prompt - 1)
    assert tokens(calls) == (3 * 8 * (prompt + len(completion)) - spared, spared)


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapter_and_checkpointing(reentrant, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    assert_follows_trl("DPO", tmp_path, options=options, peft_config=adapter)


def test_precomputed_reference(tmp_path):
    assert_follows_trl("DPO", tmp_path, options={"precompute_ref_log_probs": True})


def test_evaluation(tmp_path):
    results = []
    for options in ({}, {"share_prompts": True}):
        trainer = build(
            lowpeak_trainers, "DPO", tmp_path, options=options, eval_dataset=data_of("DPO")
        )
        calls = rows_of(trainer)
        results.append(trainer.evaluate())
        assert any("shared_prefixes" in call for call in calls) == bool(options)
    for name in ("eval_loss", "eval_rewards/margins", "eval_logps/chosen"):
        oracle.assert_close(results[1][name], results[0][name], parity.TOLERANCE)


def test_stock_trainers_share_where_enabled(tmp_path):
    with lowpeak_trainers.enabled(share_prompts=True):
        trainer = build(trl, "DPO", tmp_path, options={"max_steps": 1})
    calls = rows_of(trainer)
    trainer.train()
    assert tokens(calls)[1] > 0


def test_off_by_default(tmp_path):
    trainer = build(lowpeak_trainers, "DPO", tmp_path, options={"max_steps": 1})
    calls = rows_of(trainer)
    trainer.train()
    assert tokens(calls)[0] > 0
    assert tokens(calls)[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_free": False}, "its batches are padded, by padding_free=False"),
        ({"fused_lm_head": False}, "its batches are padded, by fused_lm_head=False"),
        ({"attention": "sdpa"}, "its batches are padded, by attention 'sdpa', which needs a mask"),
        ({"attention": "off"}, "leave those to lowpeak, or set share_prompts=False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_where_it_cannot_be(options, message, tmp_path):
    with pytest.raises(
        ValueError, match=f"share_prompts=True does not serve DPOTrainer.*{message}"
    ):
        build(lowpeak_trainers, "DPO", tmp_path, options={**options, "share_prompts": True})


@pytest.fixture
def flash():
    """A flash attention that runs anywhere: lowpeak's under another name."""
    name = "made_up_flash"
    AttentionInterface.register(name, lowpeak_attention)
    AttentionMaskInterface.register(name, lowpeak_mask)
    yield name
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping[name]


def test_other_attention_cannot_share(flash, tmp_path):
    model = tiny.llama()
    model.config._attn_implementation = flash
    options = {"padding_free": True}
    build(lowpeak_trainers, "DPO", tmp_path, model=model, options=options)
    options["share_prompts"] = True
    with pytest.raises(ValueError, match=f"DPOTrainer: attention '{flash}' cannot share them"):
        build(lowpeak_trainers, "DPO", tmp_path, model=model, options=options)


def test_reference_model_is_tested_too(tmp_path):
    reference = tiny.llama(seed=1)
    reference.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: (
            args,
            {name: x for name, x in kwargs.items() if name != "shared_prefixes"},
        ),
        with_kwargs=True,
    )
    with pytest.raises(ValueError, match="in the reference model, a packed document differs by"):
        build(
            lowpeak_trainers,
            "DPO",
            tmp_path,
            options={"share_prompts": True},
            ref_model=reference,
        )


def test_distillation_has_nothing_to_share(tmp_path):
    with pytest.raises(ValueError, match="DistillationTrainer: its batches hold each prompt once"):
        lowpeak_trainers.DistillationTrainer(
            model=tiny.llama(),
            teacher_model=tiny.llama(seed=1),
            args=lowpeak_trainers.DistillationConfig(
                **parity.settings(tmp_path, share_prompts=True)
            ),
            train_dataset=tiny.prompts([4, 7, 5, 6]),
            processing_class=tiny.tokenizer(),
        )


def test_packed_rows_have_nothing_to_share(tmp_path):
    options = {"share_prompts": True, "packing": True, "max_length": 64}
    with pytest.raises(ValueError, match="SFTTrainer: packing=True has it in packed rows already"):
        build(lowpeak_trainers, "SFT", tmp_path, options=options)


def test_environment_has_the_last_word(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPEAK_DISABLE", "padding_free")
    options = {"share_prompts": True, "max_steps": 1}
    trainer = build(lowpeak_trainers, "DPO", tmp_path, options=options)
    calls = rows_of(trainer)
    trainer.train()
    assert calls
    assert tokens(calls) == (0, 0)
