"""When `activation_offloading` moves something, when not, and what it says."""

from __future__ import annotations

import logging

import parity
import pytest
import tiny
import torch
import trl
from offloaded import METHODS, assert_same_training, build, move_everything

import lowpeak_trainers


def lines(caplog):
    """What was logged at INFO about offloading, by whom."""
    return [
        (record.name, record.getMessage())
        for record in caplog.records
        if record.levelno == logging.INFO and "offload" in record.getMessage()
    ]


@pytest.mark.parametrize("method", ["SFT", "GRPO"])
def test_h4_without_an_accelerator(method, device, tmp_path, caplog):
    """TRL's helper fails with AttributeError: 'NoneType' object has no attribute 'type'."""
    if device.type != "cpu":
        pytest.skip("there is an accelerator")
    caplog.set_level(logging.INFO, logger="lowpeak")
    assert_same_training(method, tmp_path)
    assert lines(caplog) == [
        (
            "lowpeak.offload",
            "activation offload off: Nothing is moved: there is no device whose memory is not the "
            "host's.",
        )
    ]


@pytest.mark.parametrize("method", METHODS)
def test_switched_off_by_the_environment(method, device, tmp_path, caplog, monkeypatch):
    made = move_everything(monkeypatch, device)
    monkeypatch.setenv("LOWPEAK_DISABLE", "offload")
    caplog.set_level(logging.INFO, logger="lowpeak")
    trainer = build(lowpeak_trainers, method, tmp_path, activation_offloading=True)
    assert made == []
    assert trainer.activation_offload is None
    assert trainer.args.activation_offloading is True
    said = f"activation offloading: off in {method}Trainer, by LOWPEAK_DISABLE=offload"
    assert lines(caplog) == [("lowpeak.trainers", said)]


def test_switched_off_inside_enabled(device, tmp_path, monkeypatch):
    made = move_everything(monkeypatch, device)
    monkeypatch.setenv("LOWPEAK_DISABLE", "offload")
    with lowpeak_trainers.enabled(activation_offloading=True):
        trainer = build(trl, "SFT", tmp_path, activation_offloading=True)
    trainer.train()
    assert made == []
    assert "training_step" not in vars(trainer)


@pytest.mark.parametrize("method", METHODS)
def test_off_by_default(method, device, tmp_path, monkeypatch):
    made = move_everything(monkeypatch, device)
    assert build(lowpeak_trainers, method, tmp_path).activation_offload is None
    assert made == []


def test_says_what_was_moved(device, tmp_path, caplog, monkeypatch):
    made = move_everything(monkeypatch, device, window_bytes=2048)
    caplog.set_level(logging.INFO, logger="lowpeak")
    build(lowpeak_trainers, "SFT", tmp_path, activation_offloading=True).train()
    first, last = lines(caplog)
    assert first == (
        "lowpeak.offload",
        "activation offload on for checkpoint inputs (checkpointing is on)",
    )
    said = f"activation offloading in SFTTrainer: {made[0].explain()}"
    assert last == ("lowpeak.trainers", said)


def test_auto_stays_off_where_it_gains_nothing(device, tmp_path, caplog, monkeypatch):
    """The default window holds all that a tiny model saves."""
    made = move_everything(monkeypatch, device, window_bytes=None)
    caplog.set_level(logging.INFO, logger="lowpeak.offload")
    build(lowpeak_trainers, "SFT", tmp_path, activation_offloading=True).train()
    assert made[0].stats().copied_out.count == 0
    ((_, said),) = lines(caplog)
    assert said.startswith("activation offload off: ")
    assert said.endswith("are fewer than copies in flight would hold")


def test_evaluation_and_reference_save_nothing(device, tmp_path, monkeypatch):
    """The hooks see the same tensors whether evaluation runs after every step or not."""
    made = move_everything(monkeypatch, device)
    for strategy in ("no", "steps"):
        options = {"eval_strategy": strategy, "eval_steps": 1, "activation_offloading": True}
        trainer = lowpeak_trainers.DPOTrainer(
            model=tiny.llama(),
            ref_model=tiny.llama(seed=1),
            args=lowpeak_trainers.DPOConfig(**_settings(tmp_path, **options)),
            train_dataset=tiny.preferences([(4, 6, 3)] * 8),
            eval_dataset=tiny.preferences([(4, 6, 3)] * 4),
            processing_class=tiny.tokenizer(),
        )
        assert made[-1].stats().forwards == 0
        trainer.train()
    quiet, evaluating = (offload.stats() for offload in made)
    assert quiet.forwards == evaluating.forwards > 0
    assert quiet.saved == evaluating.saved
    assert quiet.copied_out == evaluating.copied_out
    before = evaluating
    trainer.evaluate()
    assert made[1].stats() == before


def test_a_failed_step_leaves_no_hooks(device, tmp_path, monkeypatch):
    made = move_everything(monkeypatch, device)

    class Failing(lowpeak_trainers.SFTTrainer):
        fails = True

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            if self.fails:
                raise RuntimeError("failed on purpose")
            return loss

    monkeypatch.setattr(lowpeak_trainers, "SFTTrainer", Failing)
    trainer = build(lowpeak_trainers, "SFT", tmp_path, activation_offloading=True)
    with pytest.raises(RuntimeError, match="failed on purpose"):
        trainer.train()
    saved = made[0].stats().saved
    weight = torch.ones(4, requires_grad=True)
    (weight.exp() * 2).sum().backward()
    assert made[0].stats().saved == saved
    trainer.fails = False
    trainer.train()
    assert made[0].stats().copied_in.count > 0


def test_subclass_of_the_user(device, tmp_path, monkeypatch):
    """A `training_step` of the user's runs inside, also under one that stands before the mixin."""
    made = move_everything(monkeypatch, device)
    noted = []

    class Theirs(trl.GRPOTrainer):
        def training_step(self, *args, **kwargs):
            noted.append(made[0].stats().forwards)
            return super().training_step(*args, **kwargs)

    class Mine(lowpeak_trainers.LowpeakMixin, Theirs):
        pass

    monkeypatch.setattr(lowpeak_trainers, "GRPOTrainer", Mine)
    build(lowpeak_trainers, "GRPO", tmp_path, activation_offloading=True).train()
    assert len(noted) == 4
    assert noted[0] == 1
    assert made[0].stats().copied_in.count > 0


def _settings(folder, **options):
    return parity.settings(folder, max_steps=2, gradient_accumulation_steps=1, **options)
