"""What a budget of tokens promises beside equal numbers: refusals, forecasts, resuming, memory."""

from __future__ import annotations

import logging

import methods
import parity
import pytest
import tiny
import torch
import trl
from budgeted import BUDGET, METHODS, assert_follows, build, numbers, watch
from torch import nn
from transformers import TrainerCallback
from watch import embedded_shapes

import lowpeak_trainers
from lowpeak.memory import track_memory
from lowpeak_trainers.token_budget.gradients import Factor, GroupedGradients, Repeatable
from lowpeak_trainers.token_budget.rows import check_splittable

SLOW = pytest.mark.slow


@pytest.fixture
def repeats(monkeypatch):
    """Counts the second forwards of groups."""
    again, counted = Repeatable.again, []

    def counting(self, expected):
        counted.append(expected)
        return again(self, expected)

    monkeypatch.setattr(Repeatable, "again", counting)
    return counted


@pytest.mark.parametrize("method", ["Distillation", "GRPO", pytest.param("RLOO", marks=SLOW)])
def test_no_second_forward_where_gradients_are_forecast(method, repeats, tmp_path):
    """But in the first batch, which tells the factor."""
    calls = assert_follows(trl, method, tmp_path)
    assert 1 <= len(repeats) <= 4
    assert sum(call.gradients for call in calls) > 10 * len(repeats)


def test_factor_that_changes_is_corrected(repeats, tmp_path):
    """A fifth of the second step's loss: the gradients lack nothing."""

    class Shrunk(lowpeak_trainers.GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            share = 0.2 if self.state.global_step == 1 else 1.0
            return share * super().compute_loss(*args, **kwargs)

    record, logs = parity.CompletionRecord(), []
    for budget in (None, BUDGET):
        trainer = build_as(Shrunk, tmp_path, max_tokens_per_batch=budget)
        (record.record if budget is None else record.replay)(trainer)
        trainer.train()
        logs.append(trainer)
    parity.assert_same_logs(logs[1], logs[0])
    first = len(repeats)
    assert first >= 9  # in the first batch, and in the first of the second and of the third step


def build_as(trainer, folder, **options):
    package = type(
        "package", (), {"GRPOTrainer": trainer, "GRPOConfig": lowpeak_trainers.GRPOConfig}
    )
    return build(package, "GRPO", folder, **options)


@pytest.mark.parametrize("method", ["DPO", pytest.param("GRPO", marks=SLOW)])
def test_resumes_from_a_checkpoint(method, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 2

    def run(folder, budget, *callbacks, resume=None):
        trainer = build(lowpeak_trainers, method, folder, max_tokens_per_batch=budget, **options)
        if method == "GRPO":
            parity.script_completions(trainer, [[7, 9, 2], [13, 2], [40, 41, 2], [90, 2]] * 2, 0)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole", None)
    run(tmp_path / "half", BUDGET, Stop())
    half = run(tmp_path / "half", BUDGET, resume=str(tmp_path / "half" / "checkpoint-2"))
    assert len(numbers(half)) == 4
    for found, wanted in zip(numbers(half), numbers(whole), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_longer_rows_go_alone_and_are_told_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="lowpeak.trainers")
    logs = []
    for budget in (None, 12):
        trainer = build(lowpeak_trainers, "DPO", tmp_path, max_tokens_per_batch=budget, max_steps=2)
        calls = watch(trainer)
        trainer.train()
        logs.append(trainer)
    parity.assert_same_logs(*reversed(logs))
    lines = [r.getMessage() for r in caplog.records if "longer than" in r.getMessage()]
    assert len(lines) == 1
    assert "longer than max_tokens_per_batch=12 and goes through the model alone" in lines[0]
    longest = max(prompt + max(pair) for prompt, *pair in methods.PAIRS) + 1
    assert 12 < max(call.tokens for call in calls) <= longest


def test_calls_without_gradients_are_split_too(tmp_path):
    """The reference's and those of an evaluation, whose metrics stay the same."""
    losses = []
    for budget in (None, BUDGET):
        trainer = build(lowpeak_trainers, "DPO", tmp_path, max_tokens_per_batch=budget)
        calls = watch(trainer)
        losses.append(trainer.evaluate())
        assert (max(call.tokens for call in calls) <= BUDGET) == (budget is not None)
    timed = {name for name in losses[0] if any(word in name for word in ("runtime", "second"))}
    for name in losses[0].keys() - timed:
        assert losses[1][name] == pytest.approx(losses[0][name], rel=1e-5, abs=1e-5), name


def test_logits_of_an_evaluation_with_metrics(tmp_path):
    """Of whose positions each row has as many as the widest of its batch."""

    def count(prediction):
        logits = prediction.predictions
        return {"shape": logits.shape, "of_first_token": logits[:, 0].tolist()}

    found = []
    for budget in (None, 60):
        trainer = build(
            lowpeak_trainers,
            "DPO",
            tmp_path,
            max_tokens_per_batch=budget,
            padding_free=False,
        )
        trainer.compute_metrics = count
        found.append(trainer.evaluate())
    assert found[1]["eval_shape"] == found[0]["eval_shape"]
    first = [torch.tensor(metrics["eval_of_first_token"]) for metrics in found]
    torch.testing.assert_close(first[1], first[0])


@pytest.mark.parametrize("method", METHODS)
def test_budget_must_be_positive(method, tmp_path):
    with pytest.raises(ValueError, match="max_tokens_per_batch=0 is not positive"):
        build(lowpeak_trainers, method, tmp_path, max_tokens_per_batch=0)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("DPO", {"model": tiny.mixtral}, "router_aux_loss_coef=0.0"),
        ("Reward", {"share_prompts": True}, "share_prompts=False"),
        ("GRPO", {"optim": "lomo"}, "another optim"),
    ],
)
def test_refusals(method, options, reason, tmp_path):
    if "model" in options:
        options = {"model": options["model"]()}
    with pytest.raises(ValueError, match=r"max_tokens_per_batch=40 does not serve .*") as error:
        build(lowpeak_trainers, method, tmp_path, max_tokens_per_batch=BUDGET, **options)
    assert reason in str(error.value)


def test_images_are_refused():
    ids = torch.ones(3, 5, dtype=torch.long)
    call = {"input_ids": ids, "attention_mask": ids, "use_cache": False, "margin": torch.ones(3)}
    check_splittable({**call, "token_type_ids": ids}, (3, 5))
    images = {"pixel_values": torch.ones(3, 3, 8, 8), "image_sizes": torch.ones(3, 2)}
    with pytest.raises(ValueError, match="pixel_values, image_sizes of the batch have no row"):
        check_splittable({**call, **images}, (3, 5))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.0"):
        check_splittable({**call, "output_router_logits": True}, (3, 5))


def test_precomputed_reference(tmp_path):
    """TRL precomputes inside the constructor, with evaluation's batch size."""
    logs = []
    for budget in (None, BUDGET):
        reference = tiny.llama(seed=1)
        shapes = embedded_shapes(reference)
        trainer = methods.build(
            lowpeak_trainers,
            "DPO",
            tmp_path,
            ref_model=reference,
            options={
                "max_steps": 2,
                "precompute_ref_log_probs": True,
                "max_tokens_per_batch": budget,
            },
        )
        trainer.train()
        logs.append(trainer)
        assert (max(rows * width for rows, width in shapes) <= BUDGET) == (budget is not None)
    parity.assert_same_logs(*reversed(logs))


def test_off_unless_asked_for(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    build(lowpeak_trainers, "DPO", tmp_path)
    assert "token budget" not in caplog.text
    build(lowpeak_trainers, "DPO", tmp_path, max_tokens_per_batch=BUDGET)
    assert "token budget: at most 40 tokens of a batch" in caplog.text


def test_switched_off_by_the_environment(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    monkeypatch.setenv("LOWPEAK_DISABLE", "token_budget")
    trainer = build(lowpeak_trainers, "Reward", tmp_path, max_tokens_per_batch=BUDGET, max_steps=1)
    calls = watch(trainer)
    trainer.train()
    assert max(call.tokens for call in calls) > BUDGET
    assert "token budget: off in RewardTrainer, by LOWPEAK_DISABLE=token_budget" in caplog.text


def test_peak_follows_the_budget(tmp_path, device):
    """Sixteen sequences without checkpoints, about two of them at a time."""
    if device.type != "cpu":
        pytest.skip("counts the allocator events of the CPU")
    data = tiny.preferences([(60, 68, 60), (20, 30, 90), (90, 20, 30)] * 4)
    options = {"max_steps": 1, "gradient_checkpointing": False, "gradient_accumulation_steps": 1}
    peaks = []
    for budget in (None, 256):
        trainer = methods.build(
            lowpeak_trainers,
            "DPO",
            tmp_path,
            options={
                **options,
                "per_device_train_batch_size": 8,
                "max_tokens_per_batch": budget,
            },
            train_dataset=data,
        )
        with track_memory() as report:
            trainer.train()
        peaks.append(report.peak_bytes)
    # 2.3 of 9.7 MB, of which gradients and Adam's states are no part of either
    assert peaks[1] < 0.4 * peaks[0]


def test_stock_trainers_say_that_they_have_no_budget(tmp_path, caplog):
    class Package:
        RewardTrainer = trl.RewardTrainer
        RewardConfig = lowpeak_trainers.RewardConfig

    with lowpeak_trainers.enabled():
        build(Package, "Reward", tmp_path, max_tokens_per_batch=BUDGET)
    assert "RewardTrainer ignores max_tokens_per_batch=40" in caplog.text


def test_the_time_of_a_step_has_all_passes(tmp_path, monkeypatch):
    """TRL takes it inside its training_step."""
    steps, trainer_step = [], trl.GRPOTrainer.training_step

    def noting(self, *args, **kwargs):
        loss = trainer_step(self, *args, **kwargs)
        steps.append(len(calls))
        return loss

    monkeypatch.setattr(trl.GRPOTrainer, "training_step", noting)
    trainer = build(lowpeak_trainers, "GRPO", tmp_path, max_tokens_per_batch=BUDGET, max_steps=1)
    calls = watch(trainer)
    trainer.train()
    assert steps[-1] == len(calls)
    assert "backward" not in vars(trainer.accelerator)


def test_compute_loss_outside_of_a_step_says_so(tmp_path):
    trainer = build(lowpeak_trainers, "DPO", tmp_path, max_tokens_per_batch=BUDGET)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    with pytest.raises(RuntimeError, match="outside of training_step"):
        trainer.compute_loss(trainer.model, batch)


@pytest.mark.parametrize("method", ["DPO", pytest.param("GRPO", marks=SLOW)])
def test_shared_prompts_count_once(method, tmp_path):
    """Prompts of 24 tokens: a pair or a group of four within a budget that holds two rows."""
    if method == "DPO":
        data = tiny.preferences([(24, 4, 3), (24, 6, 5), (24, 2, 4), (24, 3, 7)] * 10)
    else:
        data = tiny.prompts([24] * 20)
    options = {"gradient_accumulation_steps": 1}
    logs, most = [], []
    record = parity.CompletionRecord()
    for budget in (None, 70):
        trainer = methods.build(
            lowpeak_trainers,
            method,
            tmp_path,
            options={
                "max_steps": 3,
                "per_device_train_batch_size": 8 if method == "GRPO" else 4,
                "share_prompts": True,
                "max_tokens_per_batch": budget,
                **options,
            },
            train_dataset=data,
        )
        if method == "GRPO":
            (record.record if budget is None else record.replay)(trainer)
        calls = watch(trainer)
        trainer.train()
        logs.append(trainer)
        most.append(calls)
    parity.assert_same_logs(logs[1], logs[0])
    trained = [call for call in most[1] if call.gradients]
    assert max(call.tokens for call in trained) <= 70
    # most of what one call shares, its groups share
    alone = [call for call in most[0] if call.gradients]
    assert sum(c.tokens for c in trained) <= 1.25 * sum(c.tokens for c in alone)


def test_random_numbers_of_the_second_forward_are_those_of_the_first(device):
    layer = nn.Linear(8, 8).to(device)
    inputs = [torch.randn(4, 8, device=device) for _ in range(3)]
    states = []

    def part(x):
        def run(expected):
            output = nn.functional.dropout(layer(x), 0.5)
            states.append(output.detach())
            return {"values": output}

        return Repeatable(run, device)

    grouped = GroupedGradients([part(x) for x in inputs], torch.enable_grad)
    torch.stack([leaf["values"] for leaf in grouped.leaves]).square().sum().backward()
    after = torch.get_rng_state()
    grouped.backward(synchronize=True)
    assert torch.equal(torch.get_rng_state(), after)
    first, second = states[:3], states[3:]
    assert len(second) == 2
    for one, other in zip(first, second, strict=False):
        assert torch.equal(one, other)
    wanted = torch.zeros_like(layer.weight)
    for x, output in zip(inputs, first, strict=True):
        wanted += (2 * output * 2 * (output != 0)).T @ x
    torch.testing.assert_close(layer.weight.grad, wanted)


def test_forecasts_end_after_three_misses():
    factor = Factor()
    one, two = {"x": torch.ones(3)}, {"x": 2 * torch.ones(3)}
    factor.learn([two], [one])
    assert factor.value == 2.0
    factor.learn([two], [{"x": torch.zeros(3)}])
    assert factor.value == 2.0
    for missed in (True, True, False, True, True):
        factor.count(missed)
        assert factor.value == 2.0
    factor.count(True)
    assert factor.value is None
