"""Dropout is the same whatever is recomputed, and the same as under stock TRL."""

from __future__ import annotations

import methods
import oracle
import parity
import pytest
import tiny
import torch
import trl
from peft import LoraConfig

import lowpeak_trainers

CHECKPOINTS = {
    "none": {"gradient_checkpointing": False},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non_reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
COMPLETIONS = [[7, 9, 11, 2], [13, 8, 2], [40, 41, 42, 43, 44, 2], [90, 2]] * 2


def model(rate):
    return tiny.llama(attention_dropout=rate)


def keep_dropout(method):
    """SFT has no option that switches dropout off; with the others it is on by default."""
    return {} if method == "SFT" else {"disable_dropout": False}


def gradients(method, folder, *, attention="sdpa", rate=0.2, lora=None, **options):
    """Gradients of the first step; attention None is the choice of lowpeak."""
    record = oracle.GradientRecord()
    keywords = {} if lora is None else {"peft_config": lora}
    trainer = methods.build(
        lowpeak_trainers,
        method,
        folder,
        model=model(rate),
        options={
            "max_steps": 1,
            "max_grad_norm": 1e9,
            "attention": attention,
            **keep_dropout(method),
            **options,
        },
        callbacks=[record],
        **keywords,
    )
    if method in methods.ONLINE:
        parity.script_completions(trainer, COMPLETIONS, pad=tiny.PAD)
    trainer.train()
    return record.steps[0]


@pytest.mark.parametrize(
    ("where", "attention"),
    [("attention", "eager"), ("attention", "sdpa"), ("attention", None), ("lora", "sdpa")],
)
@pytest.mark.parametrize("method", methods.FAST_METHODS)
def test_h3_recompute_draws_the_same_dropout(method, where, attention, tmp_path):
    """Bitwise: the same operations in the same order, with the same masks."""
    targets = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    options = {"attention": attention}
    if where == "lora":
        options |= {"rate": 0.0, "lora": LoraConfig(**targets, lora_dropout=0.3)}
    found = {}
    for name, checkpoint in CHECKPOINTS.items():
        torch.manual_seed(5)
        found[name] = gradients(method, tmp_path, **options, **checkpoint)
    torch.manual_seed(5)
    undropped = {"rate": 0.0} if where == "attention" else {"lora": LoraConfig(**targets)}
    plain = gradients(method, tmp_path, **{**options, **undropped}, **CHECKPOINTS["none"])
    assert any(not torch.equal(plain[name], found["none"][name]) for name in plain)
    for name in ("reentrant", "non_reentrant"):
        assert found[name].keys() == found["none"].keys()
        for parameter, wanted in found["none"].items():
            assert torch.equal(found[name][parameter], wanted), (name, parameter)


# The reference runs before the policy and draws its attention dropout first; TRL does the reverse.
REFERENCE_FIRST = pytest.mark.xfail(reason="dropout in the reference: other masks", strict=True)


@pytest.mark.parametrize(
    ("method", "where"),
    [
        pytest.param(
            method,
            where,
            marks=REFERENCE_FIRST if method in methods.REFERENCED and where == "attention" else (),
        )
        for method in methods.METHODS
        for where in ("attention", "lora")
    ],
)
def test_h3_dropout_is_that_of_trl(method, where, tmp_path):
    """The self-test may not draw from the generator. Packed rows have other masks: they are off."""
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        lora_dropout=0.3 if where == "lora" else 0.0,
    )
    stock, ours = (
        methods.build(
            package,
            method,
            tmp_path,
            model=model(0.2 if where == "attention" else 0.0),
            peft_config=lora,
            options={**keep_dropout(method), **options},
        )
        for package, options in ((trl, {}), (lowpeak_trainers, {"padding_free": False}))
    )
    if method in methods.ONLINE:
        record = parity.CompletionRecord()
        record.record(stock)
        record.replay(ours)
    for trainer in (stock, ours):
        torch.manual_seed(3)
        trainer.train()
    # RLOO's loss is the exponential of a sum over tokens, in the thousands here
    parity.assert_same_logs(ours, stock, 1e-4 if method == "RLOO" else parity.TOLERANCE)
