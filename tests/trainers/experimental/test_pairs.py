"""ORPO and CPO: five steps follow stock TRL, number by number, and no logits are made."""

from __future__ import annotations

import parity
import pytest
import tiny
from peft import LoraConfig
from trl.experimental import cpo as trl_cpo
from trl.experimental import orpo as trl_orpo

from lowpeak_trainers.experimental import cpo, orpo

PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
STOCK = {"ORPO": trl_orpo, "CPO": trl_cpo}
OURS = {"ORPO": orpo, "CPO": cpo}
PEFT = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def build(package, method, folder, model=None, lora=None, **options):
    return getattr(package, f"{method}Trainer")(
        model=tiny.llama() if model is None else model,
        args=getattr(package, f"{method}Config")(
            **parity.settings(
                folder, **{"remove_unused_columns": False, "max_length": 64, **options}
            )
        ),
        train_dataset=tiny.preferences(PAIRS),
        eval_dataset=tiny.preferences(PAIRS[:5]),
        processing_class=tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(**lora),
    )


def assert_parity(method, folder, model=tiny.llama, **options):
    return parity.assert_parity(
        lambda: build(STOCK[method], method, folder, model(), **options),
        lambda: build(OURS[method], method, folder, model(), **options),
    )


CASES = {
    "ORPO": {},
    "CPO": {},
    "CPO-SimPO": {"loss_type": "simpo", "cpo_alpha": 0.5},
    "CPO-no-nll": {"loss_type": "simpo", "cpo_alpha": 0.0},
    "CPO-hinge": {"loss_type": "hinge"},
    "CPO-ipo": {"loss_type": "ipo"},
    "CPO-AlphaPO": {"loss_type": "simpo", "alpha": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case, tmp_path):
    assert_parity(case.split("-")[0], tmp_path, eval_strategy="steps", eval_steps=2, **CASES[case])
