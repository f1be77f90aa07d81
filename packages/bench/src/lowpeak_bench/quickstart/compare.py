"""Results of both sides next to each other: ratios, deviations, and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak_bench.quickstart.settings import SIDE_NAMES
from lowpeak_bench.table import mebibytes, number, scientific

Result = Mapping[str, Any]

TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}
"""Largest |a - b| / max(1, |b|) of loss and gradient norm, b being TRL's. TRL rounds its logits
to the precision it computes in: in bf16 the last of 8 bits of a logit of 16 is 0.06."""

HEADERS = ("trainer", "with", "loss", "gradient norm", "s / step", "peak MiB", "F+B MiB")
HEADER_NOTES = (
    "loss, gradient norm: of the last step",
    "s / step: mean of all steps, measurement included",
    "peak MiB: the most live memory in any step",
    "F+B MiB: the most in forward and backward, above weights and optimizer state",
    "ratio: lowpeak / TRL; under loss and gradient norm the largest deviation of all steps",
)


@dataclass(frozen=True)
class Comparison:
    """One trainer with stock TRL and with lowpeak."""

    trainer: str
    stock: Result
    ours: Result

    @property
    def tolerance(self) -> float:
        """The deviation up to which the two sides agree."""
        return TOLERANCES[self.stock["precision"]]

    def deviation(self, key: str) -> float:
        """The largest |a - b| / max(1, |b|) over the steps of a logged value."""
        pairs = zip(self.stock["steps"], self.ours["steps"], strict=True)
        deviations = [relative_deviation(ours[key], stock[key]) for stock, ours in pairs]
        # max() alone would pass over what is not a number.
        return max(deviations, key=lambda value: (math.isnan(value), value))

    @property
    def differing_tokens(self) -> int:
        """How many tokens lowpeak's run sampled otherwise than the recorded ones (GRPO)."""
        return sum(self.ours["differing_tokens"] or ())

    @property
    def problems(self) -> list[str]:
        """What is beyond the tolerance, in words; empty where the two sides agree."""
        found = []
        for key, name in (("loss", "loss"), ("grad_norm", "gradient norm")):
            deviation = self.deviation(key)
            if math.isnan(deviation) or deviation > self.tolerance:
                found.append(
                    f"{self.trainer.upper()}: the {name} of lowpeak differs from TRL's by "
                    f"{deviation:.1e} relative to max(1, |{name}|); the tolerance in "
                    f"{self.stock['precision']} is {self.tolerance:.0e}"
                )
        return found

    @property
    def notes(self) -> list[str]:
        """What a reader should know though it is no error."""
        if not self.differing_tokens:
            return []
        return [
            f"{self.trainer.upper()}: lowpeak's run sampled {self.differing_tokens} tokens "
            "otherwise than TRL's; it was trained on TRL's completions, so that losses can be "
            "compared"
        ]

    def rows(self) -> list[list[str]]:
        """The three rows of the table: TRL, lowpeak, and their ratio, in the order of HEADERS."""
        stock, ours = summarize(self.stock), summarize(self.ours)
        return [
            [self.trainer.upper(), SIDE_NAMES["trl"], *_cells(stock)],
            ["", SIDE_NAMES["lowpeak"], *_cells(ours)],
            [
                "",
                "ratio",
                scientific(self.deviation("loss")),
                scientific(self.deviation("grad_norm")),
                number(ours.seconds / stock.seconds, 2),
                number(ours.peak_bytes / stock.peak_bytes, 2),
                number(ours.backward_bytes / stock.backward_bytes, 2),
            ],
        ]


@dataclass(frozen=True)
class Summary:
    """The figures of one run."""

    loss: float
    grad_norm: float
    seconds: float
    """Mean of the steps."""
    peak_bytes: int
    """The most live bytes in any step."""
    backward_bytes: int
    """The most bytes above weights and optimizer state up to the end of the backward."""


def summarize(result: Result) -> Summary:
    """Return the figures of a run: last loss and gradient norm, mean time, highest peaks."""
    steps = result["steps"]
    return Summary(
        loss=steps[-1]["loss"],
        grad_norm=steps[-1]["grad_norm"],
        seconds=sum(step["seconds"] for step in steps) / len(steps),
        peak_bytes=max(step["peak_bytes"] for step in steps),
        backward_bytes=max(step["backward_peak_bytes"] - step["state_bytes"] for step in steps),
    )


def relative_deviation(ours: float, stock: float) -> float:
    """Return |ours - stock| / max(1, |stock|)."""
    return abs(ours - stock) / max(1.0, abs(stock))


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Pair the results of the two sides by trainer, in their order."""
    by_run = {(result["trainer"], result["side"]): result for result in results}
    trainers = dict.fromkeys(result["trainer"] for result in results)
    return [
        Comparison(trainer, by_run[trainer, "trl"], by_run[trainer, "lowpeak"])
        for trainer in trainers
    ]


def table_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the rows of the table, in the order of HEADERS."""
    return [row for comparison in comparisons for row in comparison.rows()]


def _cells(summary: Summary) -> list[str]:
    return [
        number(summary.loss, 6),
        number(summary.grad_norm, 5),
        number(summary.seconds, 1),
        mebibytes(summary.peak_bytes),
        mebibytes(summary.backward_bytes),
    ]
