"""One small run of each method, under stock TRL or under lowpeak."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import parity
import pytest
import tiny
import trl
from transformers import Trainer

import lowpeak_trainers

METHODS = ("SFT", "DPO", "KTO", "GRPO", "RLOO")
ONLINE = ("GRPO", "RLOO")
REFERENCED = ("DPO", "KTO")
# For long tests: KTO takes the way of DPO through lowpeak, and RLOO that of GRPO.
FAST_METHODS = [
    pytest.param(method, marks=pytest.mark.slow if method in ("KTO", "RLOO") else ())
    for method in METHODS
]
PACKAGES = {"trl": trl, "lowpeak": lowpeak_trainers}

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4


def reward(completion_ids, **kwargs):
    """Reward almost without ties."""
    return [float(sum(i * t for i, t in enumerate(ids, 1)) % 17) for ids in completion_ids]


def options_of(method: str) -> dict[str, Any]:
    """What the config of `method` needs beyond `parity.settings`."""
    if method not in ONLINE:
        return {}
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    # otherwise it loads a reference model from the folder that the model's config names
    return {**options, "beta": 0.0} if method == "RLOO" else options


def keywords_of(method: str) -> dict[str, Any]:
    """What the trainer of `method` needs beyond model, args and tokenizer."""
    if method == "SFT":
        return {"train_dataset": tiny.guessable_documents(LENGTHS)}
    if method == "DPO":
        return {"train_dataset": tiny.preferences(PAIRS)}
    if method == "KTO":
        return {"train_dataset": tiny.judged([pair[:2] for pair in PAIRS], [True, False, True] * 8)}
    return {"train_dataset": tiny.prompts(LENGTHS), "reward_funcs": reward}


def build(
    package: ModuleType,
    method: str,
    folder: Path,
    *,
    model: Any = None,
    options: dict[str, Any] | None = None,
    **keywords: Any,
) -> Trainer:
    """The trainer of `method` in `package`; `options` go to the config, `keywords` to the trainer.

    DPO and KTO without adapters and without ref_model get another reference model: with equal ones
    the rewards are 0 but for rounding, and which of two is the larger says nothing.
    """
    if method in REFERENCED and "peft_config" not in keywords and "ref_model" not in keywords:
        keywords["ref_model"] = tiny.llama(seed=1)
    return getattr(package, f"{method}Trainer")(
        model=tiny.llama() if model is None else model,
        args=getattr(package, f"{method}Config")(
            **parity.settings(folder, **{**options_of(method), **(options or {})})
        ),
        **{"processing_class": tiny.tokenizer(), **keywords_of(method), **keywords},
    )


def assert_parity(method: str, folder: Path, *, model: Any = tiny.llama, **keywords: Any) -> Any:
    """Five equal steps of `method` under TRL and under lowpeak; `model()` makes the model."""
    return parity.assert_parity(
        lambda: build(trl, method, folder, model=model(), **keywords),
        lambda: build(lowpeak_trainers, method, folder, model=model(), **keywords),
        online=method in ONLINE,
    )
