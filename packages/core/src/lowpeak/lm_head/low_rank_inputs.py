"""A low-rank addition to a head inside the passes over its tiles.

The logits hidden @ weight.T + u @ b.T are a product of wider factors, [hidden, u] @ [weight, b].T,
rounded once: a block of the vocabulary is put together in scratch. Gradients are products of their
own with a tile's, so that nothing of the size of a frozen weight is computed for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .gemm import add_product
from .rows import gathered

# Rows of 16 bytes' multiples, which every product reads fastest and Hopper's descriptors need.
_STEP = 8


class LowRankFactors(NamedTuple):
    """u [N, R] and b [V, R], of floating-point dtypes of their own."""

    hidden: Tensor
    weight: Tensor

    @classmethod
    def of(cls, hidden: Tensor | None, weight: Tensor | None) -> LowRankFactors | None:
        """Both, or None for none."""
        return None if hidden is None or weight is None else cls(hidden, weight)

    def selected(self, rows: Tensor | None) -> LowRankFactors:
        """Those of some rows; None is all."""
        return self._replace(hidden=gathered(self.hidden, rows))

    def rows(self, start: int, end: int) -> LowRankFactors:
        """Those of rows [start, end), as views."""
        return self._replace(hidden=self.hidden[start:end])

    @property
    def rank(self) -> int:
        """R."""
        return self.weight.size(1)

    def to(self, dtype: torch.dtype) -> LowRankFactors:
        """Both in `dtype`."""
        return LowRankFactors(self.hidden.to(dtype), self.weight.to(dtype))


def joined_width(width: int, low: LowRankFactors | None) -> int:
    """How many features the factors of one product have: `width`, or more with `low`."""
    return width if low is None else -(-(width + low.rank) // _STEP) * _STEP


def joined(wide: Tensor, narrow: Tensor, dtype: torch.dtype) -> Tensor:
    """[wide, narrow, 0] in `dtype`: [n, H] and [n, R] to [n, `joined_width`]."""
    rows, width = wide.shape
    features = -(-(width + narrow.size(1)) // _STEP) * _STEP
    room = torch.empty(rows, features, dtype=dtype, device=wide.device)
    room[:, width + narrow.size(1) :].zero_()
    return join_into(room, wide, narrow)


def join_into(room: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """The first rows of `room`, whose last columns are zero already, with [wide, narrow]."""
    width, end = wide.size(1), wide.size(1) + narrow.size(1)
    room = room[: wide.size(0)]
    room[:, :width].copy_(wide)
    room[:, width:end].copy_(narrow)
    return room


class LowRankGradients:
    """Gradients of u [N, R] and b [V, R] while those of tiles of logits are added, in the
    statistics' dtype."""

    def __init__(
        self,
        low: LowRankFactors,
        needs: tuple[bool, bool],
        dtype: torch.dtype,
    ) -> None:
        self._hidden, self._weight = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) if need else None
            for x, need in zip(low, needs, strict=True)
        )

    def add(
        self,
        tile: Tensor,
        rows: tuple[int, int],
        columns: tuple[int, int],
        low: LowRankFactors,
        power: Tensor | None,
    ) -> None:
        """Add a tile [n, v], divided by `power`, whose rows and columns have the factors `low` in
        the dtype of the tile."""
        if self._hidden is not None:
            _add(self._hidden[rows[0] : rows[1]], tile, low.weight, power)
        if self._weight is not None:
            _add(self._weight[columns[0] : columns[1]], tile.t(), low.hidden, power)

    def finish(self) -> list[Tensor]:
        """The gradients that are needed."""
        return [x for x in (self._hidden, self._weight) if x is not None]


def _add(accumulator: Tensor, a: Tensor, b: Tensor, power: Tensor | None) -> None:
    if power is None:
        add_product(accumulator, a, b)
        return
    part = torch.zeros_like(accumulator)
    add_product(part, a, b)
    accumulator.add_(part.mul_(power))
