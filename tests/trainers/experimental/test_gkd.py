"""GKD: five steps follow stock TRL, on data and on the student's own completions."""

from __future__ import annotations

import random

import parity
import pytest
import tiny
from peft import LoraConfig
from trl.experimental import gkd as trl_gkd

from lowpeak_trainers.experimental import gkd

LENGTHS = [(4, 6), (7, 2), (3, 11), (9, 4), (5, 8), (6, 3)] * 4
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def chats(lengths):
    rows = tiny.guessable_ids(len(lengths), max(p + c for p, c in lengths))
    return tiny.Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": "user", "content": tiny.words(row[:p])},
                    {"role": "assistant", "content": tiny.words(row[p : p + c])},
                ]
                for row, (p, c) in zip(rows, lengths, strict=True)
            ]
        }
    )


def teacher():
    return tiny.llama(seed=2, hidden_size=48, initializer_range=0.15)


def build(package, folder, *, student=None, lora=None, **options):
    random.seed(0)  # which batches are on-policy
    settings = {"max_length": 64, "max_new_tokens": 6, "lmbda": 0.0, **options}
    return package.GKDTrainer(
        model=tiny.llama() if student is None else student,
        teacher_model=teacher(),
        args=package.GKDConfig(**parity.settings(folder, **settings)),
        train_dataset=chats(LENGTHS),
        eval_dataset=chats(LENGTHS[:4]),
        processing_class=tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(**lora),
    )


CASES = {
    "jsd": {},
    "forward_kl": {"beta": 0.0},
    "reverse_kl": {"beta": 1.0},
    "padded": {"padding_free": False},
    "peft": {"lora": LORA},
    "no_checkpointing": {"gradient_checkpointing": False},
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case, tmp_path):
    options = CASES[case]
    stock = {k: v for k, v in options.items() if k != "padding_free"}
    _, ours = parity.assert_parity(
        lambda: build(trl_gkd, tmp_path, **stock), lambda: build(gkd, tmp_path, **options)
    )
    assert ours.computes_divergence


@pytest.mark.parametrize("options", [{"lmbda": 1.0}, {"seq_kd": True, "lmbda": 0.5}], ids=str)
def test_parity_on_policy(options, tmp_path):
    _, ours = parity.assert_parity(
        lambda: build(trl_gkd, tmp_path, **options), lambda: build(gkd, tmp_path, **options)
    )
    assert ours.computes_divergence
