"""Rows that truncation leaves nothing to learn: dropped as TRL drops them, counted, never NaN."""

from __future__ import annotations

import logging
import math

import parity
import pytest
import tiny
import trl
from datasets import Dataset

import lowpeak_trainers

PAIRS = [(8, 3, 4), (3, 4, 2)]
COMPLETIONS = [(8, 3), (3, 4)]


def dpo(folder, *, package=lowpeak_trainers, data=None, **options):
    return package.DPOTrainer(
        model=tiny.llama(),
        ref_model=tiny.llama(seed=1),
        args=package.DPOConfig(**parity.settings(folder, **{"max_steps": 2, **options})),
        train_dataset=tiny.preferences(PAIRS) if data is None else data,
        processing_class=tiny.tokenizer(),
    )


def sft(folder, *, package=lowpeak_trainers, data=None, eval_dataset=None, **options):
    return package.SFTTrainer(
        model=tiny.llama(),
        args=package.SFTConfig(**parity.settings(folder, **{"max_steps": 2, **options})),
        train_dataset=tiny.prompt_completions(COMPLETIONS) if data is None else data,
        eval_dataset=eval_dataset,
        processing_class=tiny.tokenizer(),
    )


def kto(folder, *, package=lowpeak_trainers, **options):
    return package.KTOTrainer(
        model=tiny.llama(),
        ref_model=tiny.llama(seed=1),
        args=package.KTOConfig(**parity.settings(folder, **{"max_steps": 2, **options})),
        train_dataset=tiny.judged(COMPLETIONS, [True, False]),
        processing_class=tiny.tokenizer(),
    )


def reward(folder, *, package=lowpeak_trainers, **options):
    return package.RewardTrainer(
        model=tiny.reward_model(),
        args=package.RewardConfig(**parity.settings(folder, **{"max_steps": 2, **options})),
        train_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
    )


def dropped(caplog):
    return [r.message for r in caplog.records if "are dropped in" in r.message]


def finite(trainer):
    return all(
        math.isfinite(value)
        for entry in trainer.state.log_history
        for value in entry.values()
        if isinstance(value, float)
    )


def same_run(stock, ours):
    assert len(ours.train_dataset) == len(stock.train_dataset)
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)
    assert finite(ours)


# The prompts have 8 and 3 tokens.
LEFT = {8: 1, 7: 1, 5: 1}


@pytest.mark.parametrize("max_length", LEFT)
@pytest.mark.parametrize("loss_type", ["sigmoid", "sft", "ipo"])
def test_e3_dpo_drops_prompts_that_fill_max_length(loss_type, max_length, tmp_path, caplog):
    options = {"loss_type": loss_type, "max_length": max_length}
    stock = dpo(tmp_path, package=trl, **options)
    ours = dpo(tmp_path, **options)
    assert len(ours.train_dataset) == LEFT[max_length]
    assert dropped(caplog) == [
        "1 of 2 rows of the train dataset are dropped in DPOTrainer: their prompts alone fill "
        f"max_length={max_length} tokens"
    ]
    same_run(stock, ours)


@pytest.mark.parametrize("loss_type", ["sigmoid", "sft", "ipo"])
def test_e3_dpo_without_rows_says_so(loss_type, tmp_path):
    with pytest.raises(ValueError, match=r"train dataset has no rows left of 2: .*max_length=3 "):
        dpo(tmp_path, loss_type=loss_type, max_length=3)


@pytest.mark.parametrize("max_length", LEFT)
def test_e3_sft_drops_rows_without_a_label(max_length, tmp_path, caplog):
    stock = sft(tmp_path, package=trl, max_length=max_length)
    ours = sft(tmp_path, max_length=max_length)
    assert len(ours.train_dataset) == LEFT[max_length]
    assert dropped(caplog) == [
        f"1 of 2 rows of the train dataset are dropped in SFTTrainer: max_length={max_length} "
        "leaves them no label (truncation_mode='keep_start')"
    ]
    same_run(stock, ours)


REMEDY = "Raise max_length, set it to None, or shorten"


@pytest.mark.parametrize("streams", [False, True])
def test_e3_sft_without_rows_says_so(streams, tmp_path):
    data = tiny.prompt_completions(COMPLETIONS)
    rows = "train dataset, a stream, has no rows left" if streams else "no rows left of 2"
    with pytest.raises(ValueError, match=rf"{rows}: max_length=3 leaves .*\. {REMEDY}"):
        sft(tmp_path, max_length=3, data=data.to_iterable_dataset() if streams else data)


def test_e3_packing_keeps_rows_without_a_label_as_trl_does_and_counts_them(tmp_path, caplog):
    stock = sft(tmp_path, package=trl, packing=True, max_length=7)
    ours = sft(tmp_path, packing=True, max_length=7)
    assert "1 of 2 rows of the train dataset have no label left in SFTTrainer" in caplog.text
    assert ours.train_dataset[:] == stock.train_dataset[:]
    same_run(stock, ours)


def test_e3_packing_without_a_label_says_so(tmp_path, caplog):
    message = r"none of the 2 rows of the train dataset has a label left: .*max_length=3 tokens"
    with pytest.raises(ValueError, match=message):
        sft(tmp_path, packing=True, max_length=3)
    # The same documents in pieces keep every label.
    trainer = sft(tmp_path, packing=True, max_length=3, packing_strategy="bfd_split")
    assert "no label left" not in caplog.text
    trainer.train()
    assert finite(trainer)


def test_e3_kto_drops_as_dpo_does(tmp_path, caplog):
    stock, ours = (kto(tmp_path, package=p, max_length=8) for p in (trl, lowpeak_trainers))
    assert dropped(caplog) == [
        "1 of 2 rows of the train dataset are dropped in KTOTrainer: their prompts alone fill "
        "max_length=8 tokens"
    ]
    same_run(stock, ours)
    with pytest.raises(ValueError, match=r"no rows left of 2: .*max_length=3 tokens"):
        kto(tmp_path, max_length=3)


def test_e3_reward_models_are_given_whole_rows(tmp_path, caplog):
    stock, ours = (reward(tmp_path, package=p, max_length=8) for p in (trl, lowpeak_trainers))
    assert dropped(caplog) == [
        "1 of 2 rows of the train dataset are dropped in RewardTrainer: 'chosen' or 'rejected' is "
        "longer than max_length=8 tokens"
    ]
    same_run(stock, ours)
    with pytest.raises(ValueError, match=r"no rows left of 2: .*max_length=3 tokens"):
        reward(tmp_path, max_length=3)


KEEP_END = pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode:FutureWarning")


@KEEP_END
@pytest.mark.parametrize("max_length", [8, 5, 3, 1])
@pytest.mark.parametrize("build", [dpo, sft])
def test_keep_end_drops_nothing(build, max_length, tmp_path, caplog):
    options = {"max_length": max_length, "truncation_mode": "keep_end"}
    stock, ours = (build(tmp_path, package=p, **options) for p in (trl, lowpeak_trainers))
    assert len(ours.train_dataset) == 2
    assert dropped(caplog) == []
    assert ("max_length=1 leaves no token" in caplog.text) == (max_length == 1)
    same_run(stock, ours)


@KEEP_END
def test_keep_end_drops_what_is_learnt_at_the_start_only(tmp_path, caplog):
    ids = tiny.random_ids(6, 0)
    data = Dataset.from_dict(
        {"input_ids": [ids, ids], "labels": [[*ids[:2], *[-100] * 4], [*[-100] * 4, *ids[4:]]]}
    )
    options = {"max_length": 3, "truncation_mode": "keep_end", "data": data}
    stock, ours = (sft(tmp_path, package=p, **options) for p in (trl, lowpeak_trainers))
    assert ours.train_dataset[:]["labels"] == [[-100, *ids[4:]]]
    assert "truncation_mode='keep_end'" in dropped(caplog)[0]
    same_run(stock, ours)


@KEEP_END
def test_keep_end_is_ignored_by_packing_and_that_is_said(tmp_path, caplog):
    options = {"packing": True, "max_length": 6, "truncation_mode": "keep_end"}
    stock, ours = (sft(tmp_path, package=p, **options) for p in (trl, lowpeak_trainers))
    assert ours.train_dataset[:] == stock.train_dataset[:]
    assert "truncation_mode='keep_end' is ignored in SFTTrainer with packing: 'bfd'" in caplog.text


def test_every_dataset_is_named(tmp_path, caplog):
    short, long = tiny.prompt_completions([(2, 2)]), tiny.prompt_completions([(9, 2)])
    with pytest.raises(ValueError, match="the long dataset has no rows left of 1"):
        sft(tmp_path, max_length=5, data=short, eval_dataset={"short": short, "long": long})
    trainer = sft(tmp_path, max_length=5, data=short)
    with pytest.raises(ValueError, match="the eval dataset has no rows left of 1"):
        trainer.evaluate(long)


def test_stock_trainers_inside_enabled_say_so_too(tmp_path, caplog):
    with lowpeak_trainers.enabled():
        dpo(tmp_path, package=trl, max_length=8)
        with pytest.raises(ValueError, match="no rows left of 2"):
            dpo(tmp_path, package=trl, max_length=3)
    assert len(dropped(caplog)) == 1


def test_nothing_is_said_where_nothing_is_dropped(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "lowpeak.trainers")
    for build in (dpo, sft, kto, reward):
        build(tmp_path, max_length=30)
        build(tmp_path, max_length=None)
    assert dropped(caplog) == []


def test_a_trainer_of_ones_own_that_prepares_its_data_keeps_both(tmp_path, caplog):
    class Mine(trl.SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            return super()._prepare_dataset(*args, **kwargs).add_column("mine", [1])

    class MineWithLowpeak(lowpeak_trainers.LowpeakMixin, Mine):
        pass

    trainer = MineWithLowpeak(
        model=tiny.llama(),
        args=trl.SFTConfig(**parity.settings(tmp_path, max_length=8)),
        train_dataset=tiny.prompt_completions(COMPLETIONS),
        processing_class=tiny.tokenizer(),
    )
    assert "mine" in trainer.train_dataset.column_names
    assert len(dropped(caplog)) == 1
