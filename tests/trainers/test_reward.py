"""RewardTrainer: TRL's, with an honest log line."""

from __future__ import annotations

import logging

import parity
import pytest
import tiny
import trl

import lowpeak_trainers

PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4)]


def build(folder, trainer=lowpeak_trainers.RewardTrainer, **options):
    return trainer(
        model=tiny.reward_model(),
        args=lowpeak_trainers.RewardConfig(**parity.settings(folder, **options)),
        train_dataset=tiny.preferences(PAIRS),
        eval_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
    )


@pytest.mark.parametrize(
    "options", [{}, {"fused_lm_head": True, "lm_head_scratch_bytes": 4096}], ids=["plain", "asked"]
)
def test_says_that_there_is_no_head(options, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    build(tmp_path, **options)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert lines[0] == (
        "INFO",
        "fused LM head: nothing to do in RewardTrainer, whose model has no such head",
    )
    ignored = "fused_lm_head=True, lm_head_scratch_bytes=4096"
    warned = [("WARNING", f"RewardTrainer ignores {ignored}: its model has no LM head")]
    assert lines[1:-1] == (warned if options else [])
    assert lines[-1] == (
        "INFO",
        "padding-free: on in RewardTrainer, with attention 'lowpeak'",
    )


def test_impossible_setting_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match="lm_head_scratch_bytes=0"):
        build(tmp_path, lm_head_scratch_bytes=0)


def test_subclass_of_the_user(tmp_path):
    class Theirs(trl.RewardTrainer):
        pass

    class Mine(lowpeak_trainers.LowpeakMixin, Theirs):
        pass

    trainer = build(tmp_path, Mine)
    trainer.train()
    assert trainer.state.global_step == parity.STEPS


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_d4_eval_loss_is_a_mean_over_pairs(batch, tmp_path):
    losses = [
        build(tmp_path, per_device_eval_batch_size=size).evaluate()["eval_loss"]
        for size in (batch, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
