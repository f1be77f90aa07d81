"""The trainers tell the head what gradients to expect: they hold, and the run is that of TRL."""

from __future__ import annotations

import logging

import methods
import pytest
import tiny
import trl

import lowpeak_trainers
from lowpeak.lm_head import expectation_counts
from lowpeak.models import fused_forward
from lowpeak.models.expected_loss import expected_grads

ONE = {"per_device_train_batch_size": 1}
OLD = {"num_iterations": 2, "epsilon": 1e-3}  # old log-probabilities, and ratios that are clipped
SEQUENCE = {"importance_sampling_level": "sequence"}
BETA = {"beta": 0.1, "use_bias_correction_kl": False}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")

FAST = {
    "sft_nll": ("SFT", {}),
    "sft_dft": ("SFT", {"loss_type": "dft"}),
    "dpo_sigmoid": ("DPO", ONE),
    "dpo_ipo": ("DPO", {**ONE, "loss_type": ["ipo"]}),
    "kto_apo_zero_unpaired": ("KTO", {**ONE, "loss_type": "apo_zero_unpaired"}),
    "grpo_dapo": ("GRPO", {}),
    "grpo_dapo_old": ("GRPO", OLD),
    "grpo_beta_old": ("GRPO", {**OLD, "beta": 0.1, "use_bias_correction_kl": True}),
    "grpo_entropy_old": ("GRPO", {**OLD, "entropy_coef": 0.01}),
    "grpo_sequence": ("GRPO", {**SEQUENCE, "loss_type": "grpo"}),
}
SLOW = {
    "dpo_hinge": ("DPO", {**ONE, "loss_type": ["hinge"]}),
    "dpo_robust": ("DPO", {**ONE, "loss_type": ["robust"], "label_smoothing": 0.1}),
    "dpo_exo_pair": ("DPO", {**ONE, "loss_type": ["exo_pair"], "label_smoothing": 0.1}),
    "dpo_discopop": ("DPO", {**ONE, "loss_type": ["discopop"]}),
    "dpo_aot": ("DPO", {**ONE, "loss_type": ["aot"]}),
    "dpo_aot_unpaired": ("DPO", {**ONE, "loss_type": ["aot_unpaired"]}),
    "dpo_sigmoid_norm": ("DPO", {**ONE, "loss_type": ["sigmoid_norm"]}),
    "dpo_two_losses": ("DPO", {**ONE, "loss_type": ["sigmoid", "hinge"]}),
    "dpo_weighting": ("DPO", {**ONE, "use_weighting": True}),
    "dpo_precomputed": ("DPO", {**ONE, "precompute_ref_log_probs": True}),
    **{f"grpo_{name}": ("GRPO", {"loss_type": name}) for name in LOSSES},
    **{f"grpo_{name}_old": ("GRPO", {**OLD, "loss_type": name}) for name in LOSSES[:6]},
    "grpo_cispo_clipped": ("GRPO", {**OLD, "loss_type": "cispo", "epsilon_high": 1.001}),
    "grpo_luspo": ("GRPO", {**SEQUENCE, "loss_type": "luspo"}),
    "grpo_luspo_by_token": (
        "GRPO",
        {
            **OLD,
            "loss_type": "luspo",
        },
    ),
    "grpo_beta": ("GRPO", BETA),
    "grpo_beta_sequence": ("GRPO", {**SEQUENCE, **BETA, "loss_type": "grpo"}),
    "grpo_delta": ("GRPO", {**OLD, "delta": 1.5}),
    "grpo_entropy": ("GRPO", {"entropy_coef": 0.01}),
    "grpo_adaptive_entropy": ("GRPO", {"entropy_coef": 0.01, "use_adaptive_entropy": True}),
    "grpo_off_policy_mask": ("GRPO", {"off_policy_mask_threshold": 0.5}),
    "grpo_temperature": ("GRPO", {**OLD, "temperature": 0.7}),
    "grpo_float32_head": ("GRPO", {"cast_lm_head_to_fp32": True}),
}
CASES = {**FAST, **SLOW}


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_holds(case, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    method, options = CASES[case]
    if "beta" in options:  # the reference is loaded from where the policy came
        path = tiny.save(tiny.llama(), tmp_path / "model")
        methods.assert_parity(method, tmp_path, model=lambda: path, options=steps(options))
    else:
        methods.assert_parity(method, tmp_path, options=steps(options))
    assert_held(8, caplog)


def steps(options):
    """Four optimizer steps of two batches each."""
    return {"max_steps": 4, **options}


def assert_held(times, caplog):
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == (times, 0)
    assert f"held in {times} of {times} backward passes" in caplog.text


def assert_none(caplog, because):
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == (0, 0)
    assert because in caplog.text


def test_rloo_of_one_sequence(tmp_path, caplog):
    """Off policy too: the ratio, clipped or not, is the common factor."""
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    options = {**OLD, **ONE, "gradient_accumulation_steps": 4}
    methods.assert_parity("RLOO", tmp_path, options=steps(options))
    assert_held(16, caplog)


@pytest.mark.parametrize("options", [{}, OLD], ids=["on_policy", "two_iterations"])
def test_rloo(options, tmp_path):
    """On policy only, and where no rounding makes a ratio other than 1."""
    options = steps({**options, "gradient_accumulation_steps": 2})
    methods.assert_parity("RLOO", tmp_path, options=options)
    counts = expectation_counts()["fused_lm_head"]
    assert counts.held + counts.missed == (4 if "num_iterations" in options else 8)
    assert counts.held > counts.missed


def tied_reward(completion_ids, **kwargs):
    """Every second group has no advantages."""
    return [
        0.0 if group % 2 else reward
        for group in range(len(completion_ids) // 4)
        for reward in methods.reward(completion_ids[4 * group : 4 * group + 4])
    ]


def test_tokens_without_an_advantage_are_known_beforehand(tmp_path, monkeypatch):
    """Their rows then take no part in the products."""
    shares = []

    def noting(*arguments):
        found = expected_grads(*arguments)
        if found is not None:
            shares.append((found["log_probs"] != 0).sum() / (arguments[3] != -100).sum())
        return found

    monkeypatch.setattr(fused_forward, "expected_grads", noting)
    options = steps({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    methods.assert_parity("GRPO", tmp_path, options=options, reward_funcs=tied_reward)
    assert len(shares) == 4
    assert all(0.2 < share < 0.8 for share in shares), shares


def test_grpo_of_one_sequence(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    options = {**OLD, **ONE, **SEQUENCE, "gradient_accumulation_steps": 4, "loss_type": "grpo"}
    methods.assert_parity("GRPO", tmp_path, options=steps(options))
    assert_held(16, caplog)


class CorrectedByVllm:
    """What vLLM's importance sampling correction puts into the batch, without vLLM."""

    def _prepare_inputs(self, inputs):
        self.use_vllm = False
        inputs = super()._prepare_inputs(inputs)
        self.use_vllm = True
        ids = inputs["completion_ids"]
        return {**inputs, "importance_sampling_ratio": 0.5 + (ids % 7) / 7}


@pytest.mark.parametrize("options", [{}, OLD], ids=["on_policy", "old"])
def test_importance_sampling_correction(options, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    for package in (trl, lowpeak_trainers):
        corrected = type("GRPOTrainer", (CorrectedByVllm, package.GRPOTrainer), {})
        monkeypatch.setattr(package, "GRPOTrainer", corrected)
    methods.assert_parity("GRPO", tmp_path, options=steps(options))
    assert_held(8, caplog)


NONE = {
    "dpo_pairs": ("DPO", {}, "2 pairs"),
    "dpo_apo_zero": ("DPO", {**ONE, "loss_type": ["apo_zero"]}, "differently"),
    "dpo_sigmoid_and_ipo": ("DPO", {**ONE, "loss_type": ["sigmoid", "ipo"]}, "differently"),
    "dpo_ld_alpha": ("DPO", {**ONE, "ld_alpha": 0.5}, "ld_alpha"),
    "kto_sequences": ("KTO", {"loss_type": "apo_zero_unpaired"}, "2 sequences"),
    "grpo_top_entropy": ("GRPO", {"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
}


@pytest.mark.parametrize("case", NONE)
def test_none_where_the_gradients_are_not_known(case, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    method, options, because = NONE[case]
    ours = methods.build(lowpeak_trainers, method, tmp_path, options={"max_steps": 1, **options})
    ours.train()
    assert_none(caplog, because)


@pytest.mark.filterwarnings("ignore:`(label_smoothing_factor|compute_loss_func)` is deprecated")
def test_none_for_a_loss_from_logits(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    options = {"max_steps": 1, "label_smoothing_factor": 0.1}
    methods.build(lowpeak_trainers, "SFT", tmp_path, options=options).train()
    counts = expectation_counts().get("fused_lm_head")
    assert counts is None or (counts.held, counts.missed) == (0, 0)
    assert "expected gradients" not in caplog.text
