"""Runs a case of the parity table with stock TRL and with lowpeak."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl
from peft import LoraConfig
from transformers import PrinterCallback

import lowpeak_trainers

from . import tiny
from .cases import Case
from .harness import (
    TOLERANCE,
    Deviation,
    Logs,
    Trainer,
    deviations,
    has_lowpeak_head,
    logged,
    note_packed_rows,
    settings,
    train_both,
)

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
JUDGED = [(prompt, completion) for prompt, completion, _ in PAIRS]
# Not by turns, and 13 of 24: each batch has its own mixture of both.
LABELS = [index % 3 == 0 or index % 5 == 1 for index in range(len(PAIRS))]
ONLINE = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
METHODS_ONLINE = ("GRPO", "RLOO", "Distillation")
# TRL announces what it will remove; both runs use it on purpose.
EXPECTED_WARNINGS = (FutureWarning, DeprecationWarning, UserWarning)


@dataclass(frozen=True)
class Result:
    """What the pair of runs of one case logged."""

    case: Case
    deviations: tuple[Deviation, ...]
    stock: Logs

    def worst(self, *names: str) -> Deviation:
        """The largest deviation of these numbers, or of all others than loss and gradient norm."""
        chosen = [
            d for d in self.deviations if (d.name in names if names else d.name not in MAIN_NUMBERS)
        ]
        return max(chosen, key=lambda deviation: deviation.error)

    @property
    def compared(self) -> int:
        """How many numbers were compared."""
        return len(self.deviations)

    def faults(self) -> list[str]:
        """Numbers that deviate by more than the tolerance, or are not finite."""
        return [
            str(deviation)
            for deviation in self.deviations
            if not deviation.error <= TOLERANCE or not math.isfinite(deviation.stock)
        ]


MAIN_NUMBERS = ("loss", "grad_norm")


def letters_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward almost without ties: a hash of the completion."""
    return [float(sum(i * t for i, t in enumerate(ids, 1)) % 17) for ids in completion_ids]


def run_case(case: Case, folder: Path) -> Result:
    """Train with stock TRL and with lowpeak and compare what they logged.

    Args:
        case: what to train.
        folder: an existing folder of this case alone, for outputs.

    Raises:
        RuntimeError: when the second run did not use lowpeak.
    """
    reference = tiny.save(_reference(case), folder / "reference")
    with _expected_warnings():
        packed: list[bool] = []

        def ours_watched() -> Trainer:
            trainer = _build(lowpeak_trainers, case, folder, reference)
            note_packed_rows(trainer, packed)
            return trainer

        stock, ours = train_both(
            lambda: _build(trl, case, folder, reference),
            ours_watched,
            online=case.trainer in METHODS_ONLINE,
        )
        _require_lowpeak(case, ours, any(packed))
    logs = logged(stock)
    return Result(case, tuple(deviations(logged(ours), logs)), logs)


def stock_logs(case: Case, folder: Path) -> Logs:
    """What stock TRL alone logs."""
    reference = tiny.save(_reference(case), folder / "reference")
    with _expected_warnings():
        trainer = _build(trl, case, folder, reference)
        trainer.train()
    return logged(trainer)


@contextmanager
def _expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for category in EXPECTED_WARNINGS:
            warnings.simplefilter("ignore", category)
        yield


def moved(logs: Logs, default: Logs) -> float:
    """By how much loss and gradient norm differ between two runs at most, relative to max(1, x)."""
    return max(
        abs((a[name] or 0.0) - (b[name] or 0.0)) / max(1.0, abs(b[name] or 0.0))
        for a, b in zip(logs, default, strict=False)
        for name in MAIN_NUMBERS
        if name in a and name in b
    )


def _model(case: Case) -> Any:
    if case.model.startswith("reward"):
        return tiny.reward_model()
    if case.model == "calm":
        return tiny.llama(initializer_range=0.1)
    return tiny.mixtral() if case.model == "mixtral" else tiny.llama()


def _reference(case: Case) -> Any:
    return tiny.neighbour(_model(case), 0.2 if case.model == "calm" else 0.05)


def _build(package: Any, case: Case, folder: Path, reference: str) -> Trainer:
    model = _model(case)
    model.config._name_or_path = reference  # where GRPO and RLOO load their reference model from
    config = getattr(package, f"{case.trainer}Config")
    keywords: dict[str, Any] = {}
    if case.model.endswith("lora"):
        keywords["peft_config"] = LoraConfig(
            r=4,
            lora_alpha=8,
            task_type="SEQ_CLS" if case.trainer == "Reward" else None,
            target_modules=["q_proj", "v_proj", "down_proj"],
            # A fresh adapter leaves the policy equal to the reference: rewards are then 0 but for
            # rounding, and which of two is the larger says nothing.
            init_lora_weights=False,
        )
    elif case.trainer in ("DPO", "KTO"):
        keywords["ref_model"] = _reference(case)
    if case.trainer in ("GRPO", "RLOO"):
        keywords["reward_funcs"] = letters_reward
    if case.trainer == "Distillation":
        keywords["teacher_model"] = tiny.llama(seed=2, hidden_size=48, initializer_range=0.15)
    online = {name: value for name, value in ONLINE.items() if case.trainer in METHODS_ONLINE}
    if case.trainer == "Distillation":
        del online["num_generations"]
    trainer = getattr(package, f"{case.trainer}Trainer")(
        model=model,
        args=config(**settings(folder, **{**online, **case.options})),
        train_dataset=_data(case),
        processing_class=tiny.tokenizer(),
        **keywords,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _data(case: Case) -> Any:
    if case.trainer == "SFT":
        return tiny.guessable_documents(LENGTHS * 2 if "packing" in case.options else LENGTHS)
    if case.trainer in ("DPO", "Reward"):
        return tiny.preferences(PAIRS)
    if case.trainer == "KTO":
        return tiny.judged(JUDGED, LABELS)
    return tiny.prompts(LENGTHS)


def _require_lowpeak(case: Case, trainer: Trainer, packed: bool) -> None:
    used = packed
    if case.trainer == "Distillation":
        used &= trainer.computes_divergence
    elif case.trainer != "Reward":  # its model has no language model head
        used &= has_lowpeak_head(trainer)
    if not used:
        raise RuntimeError(f"{case.name}: the second run did not use lowpeak")
