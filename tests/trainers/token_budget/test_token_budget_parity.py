"""Batches in groups of rows log what batches at once log: loss, gradient norm and metrics."""

from __future__ import annotations

import pytest
import tiny
import trl
from budgeted import BUDGET, METHODS, assert_follows
from peft import LoraConfig, get_peft_model


def assert_within(calls, budget=BUDGET):
    trained = [call for call in calls if call.gradients]
    assert len(trained) >= 10
    assert max(call.tokens for call in trained) <= budget
    return trained


SLOW = pytest.mark.slow
ACCUMULATED = [
    pytest.param(method, 4, marks=() if method in ("DPO", "GRPO") else SLOW) for method in METHODS
]
AT_ONCE = [
    pytest.param(method, 1, marks=SLOW if method in ("DPO", "GRPO") else ()) for method in METHODS
]


@pytest.mark.parametrize(("method", "accumulation"), AT_ONCE + ACCUMULATED)
def test_follows_trl(method, accumulation, tmp_path):
    options = {"gradient_accumulation_steps": accumulation, "learning_rate": 3e-4}
    trained = assert_within(assert_follows(trl, method, tmp_path, **options))
    assert all(call.shape[0] == 1 for call in trained)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in ("Reward", "GRPO") else SLOW) for m in METHODS]
)
def test_padded_batches_count_their_padding(method, tmp_path):
    calls = assert_follows(trl, method, tmp_path, padding_free=False, max_tokens_per_batch=80)
    trained = assert_within(calls, 80)
    assert any(call.shape[0] > 1 for call in trained)
    # groups are cut to their longest row
    assert len({call.shape[1] for call in trained}) > 1


# Losses that tie the rows of a batch together, or their normaliser to its tokens.
CASES = {
    "dpo_aot": ("DPO", {"loss_type": ["aot"]}),
    "dpo_bco_wpo": ("DPO", {"loss_type": ["bco_pair"], "use_weighting": True}),
    "grpo_bnpo": ("GRPO", {"loss_type": "bnpo"}),
    "grpo_rows": ("GRPO", {"loss_type": "grpo", "num_iterations": 2, "steps_per_generation": 2}),
    "grpo_quantile": ("GRPO", {"top_entropy_quantile": 0.5}),
    "grpo_entropy": ("GRPO", {"entropy_coef": 0.01}),
    "grpo_sequence": (
        "GRPO",
        {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "dr_grpo"},
    ),
    "grpo_kl": ("GRPO", {"beta": 0.1, "num_iterations": 2}),
    "reward_centred": ("Reward", {"center_rewards_coefficient": 0.1}),
    "distillation_reverse": ("Distillation", {"beta": 1.0}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ("dpo_aot", "grpo_sequence") else SLOW) for c in CASES],
)
def test_losses_of_whole_batches(case, tmp_path):
    method, options = CASES[case]
    if options.get("beta") and method == "GRPO":  # its reference is read from a folder
        options = {**options, "model": lambda: lora()}
    assert_within(assert_follows(trl, method, tmp_path, learning_rate=3e-4, **options))


def lora():
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny.llama(), settings)


@pytest.mark.parametrize("method", ["DPO", pytest.param("GRPO", marks=SLOW)])
def test_adapters(method, tmp_path):
    assert_within(assert_follows(trl, method, tmp_path, model=lora))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GRPO", "DPO"])
def test_filled_rows_stay_within(method, tmp_path):
    calls = assert_follows(trl, method, tmp_path, pad_to_multiple_of=8, max_tokens_per_batch=44)
    trained = assert_within(calls, 40)
    assert all(call.tokens % 8 == 0 for call in trained)
