"""Whether upstream gradients are the expected ones up to a factor, and how often they were."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6
MOST_MISSES = 3
# Counted like an expectation: of a frozen head, that only log-probabilities receive gradients.
FROZEN = "fused_lm_head, frozen weight"


@dataclass(frozen=True)
class ExpectationCounts:
    """How often the expected gradients of one function were the actual ones."""

    held: int = 0
    missed: int = 0
    misses_in_a_row: int = 0


class ExpectationCounter:
    """Counts hits and misses of one function; after MOST_MISSES in a row it says no, with a log
    line."""

    def __init__(self, function: str) -> None:
        self._function = function
        self.counts = ExpectationCounts()

    @property
    def worth_trying(self) -> bool:
        """Whether the next expectation is to be believed."""
        return self.counts.misses_in_a_row < MOST_MISSES

    def record(self, held: bool) -> None:
        """Count one backward."""
        counts = self.counts
        if held:
            self.counts = ExpectationCounts(counts.held + 1, counts.missed, 0)
            return
        row = counts.misses_in_a_row + 1
        self.counts = ExpectationCounts(counts.held, counts.missed + 1, row)
        if row == MOST_MISSES:
            logger.info(
                "%s: the backward received other gradients than expected %d times in a row (%d "
                "held before) and recomputed, exactly: nothing is kept for it any more",
                self._function,
                row,
                counts.held,
            )


_counters: dict[str, ExpectationCounter] = {}


def expectation_counter(function: str) -> ExpectationCounter:
    """The process's counter of `function`, made at its first mention."""
    return _counters.setdefault(function, ExpectationCounter(function))


def expectation_counts() -> dict[str, ExpectationCounts]:
    """How often `expected_grads` held, by function name, since the process began or was reset."""
    return {name: counter.counts for name, counter in _counters.items()}


def reset_expectations() -> None:
    """Begin a new run: all counts are 0, and expectations are tried again."""
    for counter in _counters.values():
        counter.counts = ExpectationCounts()


@dataclass(frozen=True)
class Verdict:
    """`held`: upstream = factor * expected. `counts`: whether that says anything, False for
    gradients that are not finite (a gradient scaler's overflow), which never hold."""

    held: bool
    counts: bool
    factor: float


def judge(expected: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> Verdict:
    """Compare expected gradients h and upstream gradients g of a function's outputs, each [N].

    An output that is missing on one side counts as 0 there. With f by least squares over all
    outputs together, the expectation holds when max|g - f h| <= 1e-6 max|g|. One host
    synchronisation.
    """
    names = list(dict.fromkeys((*expected, *upstream)))
    some = next(iter({**expected, **upstream}.values()))
    dtype = torch.float64 if some.device.type in ("cpu", "cuda") else torch.float32
    h, g = (_joined(side, names, some, dtype) for side in (expected, upstream))
    if not h.numel():
        return Verdict(True, False, 1.0)
    # Divided by its largest, for squares that neither underflow nor overflow.
    scale = h.abs().amax()
    unit = h / torch.where(scale > 0, scale, 1.0)
    length = unit.square().sum()
    factor = (g * unit).sum() / torch.where(length > 0, length, 1.0)
    distance = (g - factor * unit).abs().amax()
    factor = factor / torch.where(scale > 0, scale, 1.0)
    apart, largest, found = torch.stack([distance, g.abs().amax(), factor]).tolist()
    finite = math.isfinite(apart) and math.isfinite(largest)
    return Verdict(finite and apart <= TOLERANCE * largest, finite, found)


def _joined(
    side: Mapping[str, Tensor], names: list[str], like: Tensor, dtype: torch.dtype
) -> Tensor:
    missing = torch.zeros_like(like)
    return torch.cat([side.get(name, missing).to(dtype) for name in names])
