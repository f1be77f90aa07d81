"""Failures of GRPO that users reported; the oracle is every rollout alone, full logits."""

from __future__ import annotations

import math

import oracle
import parity
import pytest
import tiny
import torch
from trl.trainer.utils import get_config_model_id

import lowpeak_trainers

PROMPT = [20, 31, 42]
REWARDS = [1.0, -0.5, 2.0, 0.25]
ADVANTAGES = (torch.tensor(REWARDS, dtype=torch.float64) - 0.6875) / (
    torch.tensor(REWARDS, dtype=torch.float64).std() + 1e-4
)
LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
LONGEST = 5


def completion(length, seed, truncated=False):
    """A completion of `length` tokens; the last is EOS unless it was truncated."""
    return tiny.random_ids(length if truncated else length - 1, seed) + [tiny.EOS] * (not truncated)


def ranked_reward(completions, **kwargs):
    """Rewards in the order of generation."""
    return REWARDS[: len(completions)]


def one_step(folder, completions, **options):
    """Logs and gradients of one optimizer step over four scripted rollouts of one prompt."""
    record = oracle.GradientRecord()
    model = tiny.llama()
    reference = tiny.save(tiny.llama(seed=options.pop("reference_seed", 1)), folder / "reference")
    model.config._name_or_path = reference
    assert get_config_model_id(model.config) == reference
    trainer = lowpeak_trainers.GRPOTrainer(
        model=model,
        reward_funcs=ranked_reward,
        args=lowpeak_trainers.GRPOConfig(
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


def right_loss(loss_type, completions, kept, beta, temperature, reference_seed=1):
    """On-policy loss and gradients; only the `kept` rollouts count.

    With ratio exp(logp - old) = 1 nothing is clipped, but CISPO bounds its detached ratio by
    epsilon_high = 0.2 as TRL 1.16 does. Sums over tokens as in TRL's documentation of loss_type.
    """
    policy = oracle.in_float64(tiny.llama())
    reference = oracle.in_float64(tiny.llama(seed=reference_seed))
    start = len(PROMPT) - 1
    sums, lengths = [], []
    for ids, advantage, keep in zip(completions, ADVANTAGES, kept, strict=True):
        logp = oracle.log_probs(policy, PROMPT + ids, temperature)[start:]
        ratio = (logp - logp.detach()).exp()
        if loss_type == "cispo":
            loss = -0.2 * advantage * logp
        elif loss_type == "vespo":
            loss = -advantage * logp
        elif loss_type == "sapo":
            sharpness = 1.0 if advantage > 0 else 1.05
            loss = -torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantage
        else:
            loss = -ratio * advantage
        if beta:
            with torch.no_grad():
                ref = oracle.log_probs(reference, PROMPT + ids, temperature)[start:]
            # The KL term times the ratio, which is 1 but has a gradient (arXiv 2512.02556).
            loss = loss + beta * ((ref - logp).exp() - (ref - logp) - 1) * ratio
        sums.append(loss.sum() * keep)
        lengths.append(len(ids) * keep)
    tokens = max(sum(lengths), 1)
    if loss_type in ("grpo", "sapo"):
        total = sum(s / max(n, 1) for s, n in zip(sums, lengths, strict=True)) / len(sums)
    elif loss_type == "dr_grpo":
        total = sum(sums) / (len(sums) * LONGEST)
    elif loss_type == "luspo":
        total = sum(sums) / len(sums)
    else:
        total = sum(sums) / tokens
    total.backward()
    return total.item(), oracle.gradients(policy)


FOUR = [completion(4, 1), completion(2, 2), completion(3, 3), completion(5, 4)]


def test_a13_temperature_is_in_policy_reference_and_gradient(tmp_path):
    logs, gradients = one_step(tmp_path, FOUR, beta=0.04, temperature=0.7, reference_seed=0)
    _, right = right_loss("dapo", FOUR, [1] * 4, 0.04, 0.7, reference_seed=0)
    assert abs(logs["kl"]) <= 1e-9
    oracle.assert_same_gradients(gradients, right)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in right.values()))
    oracle.assert_close(logs["grad_norm"], norm)
    _, cold = right_loss("dapo", FOUR, [1] * 4, 0.04, 1.0, reference_seed=0)
    with pytest.raises(AssertionError, match="is off by"):
        oracle.assert_same_gradients(gradients, cold)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_g1_truncated_completion_counts_nowhere(loss_type, beta, tmp_path):
    one_truncated = [*FOUR[:3], completion(LONGEST, 4, truncated=True)]
    options = {"loss_type": loss_type, "beta": beta, "mask_truncated_completions": True}
    logs, gradients = one_step(tmp_path, one_truncated, **options)
    right, right_gradients = right_loss(loss_type, one_truncated, [1, 1, 1, 0], beta, 1.0)
    oracle.assert_close(logs["loss"], right)
    oracle.assert_same_gradients(gradients, right_gradients)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_g1_all_completions_truncated_give_zero(loss_type, beta, tmp_path):
    truncated = [completion(LONGEST, seed, truncated=True) for seed in range(4)]
    options = {"loss_type": loss_type, "beta": beta, "mask_truncated_completions": True}
    logs, gradients = one_step(tmp_path, truncated, **options)
    assert logs["loss"] == 0.0
    assert logs["grad_norm"] == 0.0
    # TRL logs None for the smallest of no clip ratios.
    assert all(math.isfinite(value) for value in logs.values() if value is not None)
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert torch.count_nonzero(gradient) == 0, name


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_g2_accumulation_changes_nothing(loss_type, batch, accumulation, tmp_path):
    _, gradients = one_step(
        tmp_path,
        FOUR,
        loss_type=loss_type,
        temperature=0.7,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    _, right = right_loss(loss_type, FOUR, [1] * 4, 0.0, 0.7)
    oracle.assert_same_gradients(gradients, right)
