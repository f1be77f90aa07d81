"""Five optimizer steps under lowpeak follow five under stock TRL, number by number."""

from __future__ import annotations

import parity
import pytest
import tiny
import trl
from peft import LoraConfig

import lowpeak_trainers

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
LORA = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    # A fresh adapter leaves the policy equal to the reference: rewards are then 0 but for rounding,
    # and which of two is the larger says nothing.
    "init_lora_weights": False,
}

SFT_CASES = {
    "padded": ({}, lambda: tiny.guessable_documents(LENGTHS)),
    "padding_free": (
        {"padding_free": True, "max_length": None},
        lambda: tiny.guessable_documents(LENGTHS),
    ),
    "packed": (
        {"packing": True, "max_length": 32, "per_device_train_batch_size": 1},
        lambda: tiny.guessable_documents(LENGTHS * 2),
    ),
    "completion_only": (
        {},
        lambda: tiny.prompt_completions([(p, c) for p, c, _ in PAIRS]),
    ),
}


@pytest.mark.parametrize("case", SFT_CASES)
def test_sft_nll(case, tmp_path):
    overrides, data = SFT_CASES[case]

    def build(trainer, config):
        return trainer(
            model=tiny.llama(),
            args=config(**parity.settings(tmp_path, **overrides)),
            train_dataset=data(),
            processing_class=tiny.tokenizer(),
        )

    stock, _ = parity.assert_parity(
        lambda: build(trl.SFTTrainer, trl.SFTConfig),
        lambda: build(lowpeak_trainers.SFTTrainer, lowpeak_trainers.SFTConfig),
    )
    assert 0.2 < stock.state.log_history[0]["mean_token_accuracy"] < 0.8


DPO_CASES = {
    "reference_model": ({}, None),
    "precomputed": ({"precompute_ref_log_probs": True}, None),
    "weighted_by_length": ({"ld_alpha": 0.5}, None),
    "peft": ({}, LORA),
    "peft_precomputed": ({"precompute_ref_log_probs": True}, LORA),
}


def test_dpo_loads_its_own_reference(tmp_path):
    """Without ref_model the reference is loaded from the folder that the policy's config names."""
    folder = tiny.save(tiny.llama(seed=1), tmp_path / "reference")

    def build(trainer, config):
        model = tiny.llama()
        model.config._name_or_path = folder
        return trainer(
            model=model,
            args=config(**parity.settings(tmp_path)),
            train_dataset=tiny.preferences(PAIRS),
            processing_class=tiny.tokenizer(),
        )

    stock, ours = parity.assert_parity(
        lambda: build(trl.DPOTrainer, trl.DPOConfig),
        lambda: build(lowpeak_trainers.DPOTrainer, lowpeak_trainers.DPOConfig),
    )
    assert stock.ref_model is not None
    assert ours.ref_model is not None


@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo_sigmoid(case, tmp_path):
    overrides, lora = DPO_CASES[case]

    def build(trainer, config):
        return trainer(
            model=tiny.llama(),
            ref_model=None if lora else tiny.llama(seed=1),
            args=config(**parity.settings(tmp_path, **overrides)),
            train_dataset=tiny.preferences(PAIRS),
            processing_class=tiny.tokenizer(),
            peft_config=LoraConfig(**lora) if lora else None,
        )

    stock, ours = parity.assert_parity(
        lambda: build(trl.DPOTrainer, trl.DPOConfig),
        lambda: build(lowpeak_trainers.DPOTrainer, lowpeak_trainers.DPOConfig),
    )
    assert stock.state.log_history[0]["mean_token_accuracy"] > 0
    assert (ours.ref_model is None) == (stock.ref_model is None) == bool(lora)


def letters_reward(completion_ids, **kwargs):
    """Reward without a tie: a hash of the completion."""
    return [float(sum(i * t for i, t in enumerate(ids, 1)) % 17) for ids in completion_ids]


GRPO_CASES = {
    "beta_0": {},
    "beta_0.04": {"beta": 0.04},
    "entropy_bonus": {"entropy_coef": 0.01},
    "temperature": {"temperature": 0.7, "beta": 0.04},
    "two_iterations": {"num_iterations": 2},
    "float32_head": {"cast_lm_head_to_fp32": True},
}


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo_dapo(case, tmp_path):
    path = tiny.save(tiny.llama(), tmp_path / "model")

    def build(trainer, config):
        return trainer(
            model=path,
            reward_funcs=letters_reward,
            args=config(
                **parity.settings(
                    tmp_path,
                    per_device_train_batch_size=4,
                    num_generations=4,
                    max_completion_length=8,
                    **GRPO_CASES[case],
                )
            ),
            train_dataset=tiny.prompts(LENGTHS),
            processing_class=tiny.tokenizer(),
        )

    parity.assert_parity(
        lambda: build(trl.GRPOTrainer, trl.GRPOConfig),
        lambda: build(lowpeak_trainers.GRPOTrainer, lowpeak_trainers.GRPOConfig),
        online=True,
    )
