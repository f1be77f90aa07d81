"""Failures of group-relative training, seen from RLOO; the oracle is every rollout alone."""

from __future__ import annotations

import math

import oracle
import parity
import pytest
import tiny
import torch

import lowpeak_trainers

PROMPT = [20, 31, 42]
REWARDS = [1.0, -0.5, 2.0, 0.25]
LONGEST = 5
FOUR = [[*tiny.random_ids(n - 1, seed), tiny.EOS] for seed, n in enumerate((4, 2, 3, 5))]
TRUNCATED = [tiny.random_ids(LONGEST, seed) for seed in range(4)]


def one_step(folder, completions, **options):
    """Logs and gradients of one optimizer step over four scripted rollouts of one prompt."""
    record = oracle.GradientRecord()
    model = tiny.llama()
    seed = options.pop("reference_seed", 1)
    model.config._name_or_path = tiny.save(tiny.llama(seed=seed), folder / "reference")
    trainer = lowpeak_trainers.RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: REWARDS[: len(completions)],
        args=lowpeak_trainers.RLOOConfig(
            **parity.settings(
                folder,
                **{
                    "max_steps": 1,
                    "per_device_train_batch_size": 4,
                    "gradient_accumulation_steps": 1,
                    "num_generations": 4,
                    "max_completion_length": LONGEST,
                    "max_grad_norm": 1e9,
                    **options,
                },
            )
        ),
        train_dataset=tiny.Dataset.from_dict({"prompt": [tiny.words(PROMPT)]}),
        processing_class=tiny.tokenizer(),
        callbacks=[record],
    )
    parity.script_completions(trainer, completions, tiny.PAD)
    trainer.train()
    return trainer.state.log_history[0], record.steps[0]


def right_gradients(completions, beta=0.0, temperature=1.0, reference_seed=1, kept=None):
    """On policy each ratio is 1: minus the mean of advantage times sequence log-probability.

    The reward of a rollout is less beta times its KL term, log policy - log reference; the baseline
    is the mean over the other three.
    """
    policy = oracle.in_float64(tiny.llama())
    reference = oracle.in_float64(tiny.llama(seed=reference_seed))
    start = len(PROMPT) - 1
    kept = kept or [1] * len(completions)
    logps = [
        oracle.log_probs(policy, PROMPT + ids, temperature)[start:].sum() * keep
        for ids, keep in zip(completions, kept, strict=True)
    ]
    with torch.no_grad():
        refs = [
            oracle.log_probs(reference, PROMPT + ids, temperature)[start:].sum() * keep
            for ids, keep in zip(completions, kept, strict=True)
        ]
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    rewards = rewards - beta * torch.stack(
        [p.detach() - r for p, r in zip(logps, refs, strict=True)]
    )
    advantages = rewards - (rewards.sum() - rewards) / 3
    loss = -(advantages * torch.stack(logps)).mean()
    loss.backward()
    return oracle.gradients(policy)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.05, 1.0), (0.05, 0.7)])
def test_values_against_full_logits(beta, temperature, tmp_path):
    _, gradients = one_step(tmp_path, FOUR, beta=beta, temperature=temperature)
    oracle.assert_same_gradients(gradients, right_gradients(FOUR, beta, temperature))


def test_a13_temperature_is_in_policy_reference_and_gradient(tmp_path):
    logs, gradients = one_step(tmp_path, FOUR, beta=0.05, temperature=0.7, reference_seed=0)
    assert abs(logs["kl"]) <= 1e-6
    right = right_gradients(FOUR, 0.05, 0.7, reference_seed=0)
    oracle.assert_same_gradients(gradients, right)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in right.values()))
    oracle.assert_close(logs["grad_norm"], norm)


def test_g1_truncated_completion_counts_nowhere(tmp_path):
    """A masked rollout has no log-probability, so no gradient; its reward stays in the baseline."""
    one = [*FOUR[:3], TRUNCATED[3]]
    _, gradients = one_step(tmp_path, one, beta=0.0, mask_truncated_completions=True)
    oracle.assert_same_gradients(gradients, right_gradients(one, kept=[1, 1, 1, 0]))


def test_g1_all_completions_truncated_give_zero_gradients(tmp_path):
    logs, gradients = one_step(tmp_path, TRUNCATED, mask_truncated_completions=True)
    assert logs["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in logs.values() if value is not None)
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert torch.count_nonzero(gradient) == 0, name


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4), (2, 2)])
def test_g2_accumulation_changes_nothing(batch, accumulation, tmp_path):
    _, gradients = one_step(
        tmp_path,
        FOUR,
        beta=0.0,
        temperature=0.7,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    oracle.assert_same_gradients(gradients, right_gradients(FOUR, temperature=0.7))
