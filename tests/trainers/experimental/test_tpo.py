"""TPO: five steps follow stock TRL, number by number."""

from __future__ import annotations

import parity
import pytest
import tiny
from peft import LoraConfig
from trl.experimental import tpo as trl_tpo

from lowpeak_trainers.experimental import tpo

PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def triples(lengths):
    gold = [" " + tiny.words(tiny.random_ids(7 - i % 3, 50 + i)) for i in range(len(lengths))]
    return tiny.preferences(lengths).add_column("reference", gold)


def build(package, folder, *, model=None, lora=None, **options):
    return package.TPOTrainer(
        model=tiny.llama() if model is None else model,
        args=package.TPOConfig(**parity.settings(folder, **options)),
        train_dataset=triples(PAIRS),
        eval_dataset=triples(PAIRS[:5]),
        processing_class=tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(**lora),
    )


CASES = {
    "sigmoid": {"eval_strategy": "steps", "eval_steps": 2},
    "smoothed": {"label_smoothing": 0.2},
    "without_reference": {"tpo_alpha": 0.0},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "tpo_l": {"loss_type": "tpo-l", "tpo_l_gamma": 0.4},
    "peft": {"lora": LORA},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case, tmp_path):
    stock, ours = parity.assert_parity(
        lambda: build(trl_tpo, tmp_path, **CASES[case]), lambda: build(tpo, tmp_path, **CASES[case])
    )
    assert stock.state.log_history[0]["mean_token_accuracy"] > 0
    assert ours._layout.on


def test_logits_for_compute_metrics(tmp_path):
    trainer = build(tpo, tmp_path)
    _, logits, _ = trainer.prediction_step(
        trainer.model, next(iter(trainer.get_eval_dataloader())), prediction_loss_only=False
    )
    assert logits.size(-1) == tiny.VOCABULARY


def test_unknown_loss(tmp_path):
    trainer = build(tpo, tmp_path)
    trainer.loss_type = "other"
    with pytest.raises(ValueError, match="loss_type='other' is unknown"):
        trainer.train()
