"""OnlineDPO: five steps on replayed completions follow stock TRL, number by number."""

from __future__ import annotations

import parity
import pytest
import tiny
from peft import LoraConfig
from trl.experimental import online_dpo as trl_online_dpo

from lowpeak_trainers.experimental import online_dpo

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def reward(completion_ids, **kwargs):
    """Reward almost without ties."""
    return [float(sum(i * t for i, t in enumerate(ids, 1)) % 17) for ids in completion_ids]


def build(package, folder, *, model=None, lora=None, **options):
    settings = {"max_new_tokens": 8, "max_length": 64, **options}
    return package.OnlineDPOTrainer(
        model=tiny.llama() if model is None else model,
        reward_funcs=reward,
        args=package.OnlineDPOConfig(**parity.settings(folder, **settings)),
        train_dataset=tiny.prompts(LENGTHS),
        processing_class=tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(**lora),
    )


CASES = {
    "sigmoid": {},
    "ipo": {"loss_type": "ipo", "beta": 0.3},
    "truncated": {"max_length": 20},
    "penalty": {"missing_eos_penalty": 1.0},
    "peft": {"lora": LORA},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case, tmp_path):
    parity.assert_parity(
        lambda: build(trl_online_dpo, tmp_path, **CASES[case]),
        lambda: build(online_dpo, tmp_path, **CASES[case]),
        online=True,
    )
