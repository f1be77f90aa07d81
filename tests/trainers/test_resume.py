"""A run handed from stock TRL to lowpeak and back is the run of stock TRL."""

from __future__ import annotations

import json

import methods
import parity
import pytest
import torch
import trl
from transformers import TrainerCallback

import lowpeak_trainers

STEPS = 6
# 5 steps are an epoch, so that the checkpoints after 2 and 4 lie in the middle of one.
OPTIONS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
COMPLETIONS = [[7, 9, 11, 2], [13, 8, 2], [40, 41, 42, 43, 44, 2], [90, 2]] * 2
PACKED = {"packing": True, "max_length": 32, "per_device_train_batch_size": 1}


def run(package, method, folder, *, until=STEPS, resume=None, options=None):
    """Train to step `until`; online methods score the same completions at every step."""
    trainer = methods.build(package, method, folder, options={**OPTIONS, **(options or {})})
    if method in methods.ONLINE:
        parity.script_completions(trainer, COMPLETIONS, pad=0)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= until

    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == until
    return trainer


def numbers(trainer):
    """Loss and gradient norm of every step, also those before a resume."""
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


def assert_same_run(found, wanted):
    """Same numbers at every step, and same weights; one step of Adam moves a weight by 1e-3."""
    assert len(numbers(wanted)) == STEPS
    for one, other in zip(numbers(found), numbers(wanted), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    for name, weight in wanted.model.state_dict().items():
        torch.testing.assert_close(
            found.model.state_dict()[name], weight, rtol=1e-4, atol=1e-4, msg=name
        )


@pytest.mark.parametrize("method", methods.METHODS)
def test_h9_from_trl_to_lowpeak_and_back(method, tmp_path):
    whole = run(trl, method, tmp_path / "whole")
    relay = tmp_path / "relay"
    run(trl, method, relay, until=2)
    run(lowpeak_trainers, method, relay, until=4, resume=str(relay / "checkpoint-2"))
    last = run(trl, method, relay, resume=str(relay / "checkpoint-4"))
    state = json.loads((relay / "checkpoint-4" / "trainer_state.json").read_text())
    assert 0 < state["epoch"] % 1 < 1
    assert_same_run(last, whole)


def test_h9_packed_run_in_two_halves(tmp_path):
    whole = run(lowpeak_trainers, "SFT", tmp_path / "whole", options=PACKED)
    run(lowpeak_trainers, "SFT", tmp_path / "half", until=3, options={**PACKED, "save_steps": 3})
    second = run(
        lowpeak_trainers,
        "SFT",
        tmp_path / "half",
        resume=str(tmp_path / "half" / "checkpoint-3"),
        options={**PACKED, "save_steps": 3},
    )
    assert whole.args.gradient_checkpointing
    assert_same_run(second, whole)
