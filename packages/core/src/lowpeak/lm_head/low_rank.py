"""Low-rank additions to a head's weight: LoRA on the LM head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .low_rank_inputs import LowRankFactors

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRank:
    """An addition scale * b @ a to a head's weight [V, H], which is never made.

    Args:
        a: [r, H], a floating-point dtype that may differ from the weight's.
        b: [V, r].
        scale: alpha / r of LoRA (Hu et al. 2021, arXiv:2106.09685), alpha / sqrt(r) of rsLoRA
            (Kalajdzievski 2023, arXiv:2312.03732).

    Raises:
        TypeError, ValueError: for what is no floating-point matrix, ranks that differ, or a scale
            that is not finite.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if not isinstance(value, Tensor):
                raise TypeError(f"low_rank: {name} is {value!r}: pass a tensor")
            if value.dtype not in _FLOATS:
                raise TypeError(f"low_rank: {name} has dtype {value.dtype}: pass one of {_FLOATS}")
            if value.dim() != 2:
                raise ValueError(
                    f"low_rank: {name} has shape {tuple(value.shape)}: pass a matrix, a [r, H] and "
                    "b [V, r]"
                )
        if self.a.size(0) != self.b.size(1) or not self.a.size(0):
            raise ValueError(
                f"low_rank: a has shape {tuple(self.a.shape)} and b {tuple(self.b.shape)}: pass "
                "[r, H] and [V, r] of the same rank r, at least 1"
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"low_rank: scale={self.scale} is not finite")


def check_low_rank(
    low_rank: LowRank | Sequence[LowRank] | None, hidden: Tensor, weight: Tensor
) -> tuple[LowRank, ...]:
    """The additions to `weight`, checked against its shape and device.

    Raises:
        TypeError, ValueError: with what it is and what it should be.
    """
    if low_rank is None:
        return ()
    additions = (low_rank,) if isinstance(low_rank, LowRank) else tuple(low_rank)
    vocabulary, width = weight.shape
    for addition in additions:
        if not isinstance(addition, LowRank):
            raise TypeError(
                f"low_rank holds a {type(addition).__name__}: pass a LowRank or a sequence of them"
            )
        a, b = addition.a, addition.b
        if a.size(1) != width or b.size(0) != vocabulary:
            raise ValueError(
                f"low_rank: a has shape {tuple(a.shape)} and b {tuple(b.shape)}, but weight "
                f"{(vocabulary, width)}: pass [r, {width}] and [{vocabulary}, r]"
            )
        for name, x in (("a", a), ("b", b)):
            if x.device != hidden.device:
                raise ValueError(f"low_rank: {name} is on {x.device}, hidden on {hidden.device}")
    return additions


def low_rank_factors(hidden: Tensor, additions: Sequence[LowRank]) -> LowRankFactors | None:
    """All additions side by side: scale * hidden @ a.T [N, R] and b [V, R], R the sum of ranks.

    Differentiable in hidden, a and b.
    """
    if not additions:
        return None
    a = _side_by_side([x.a for x in additions], 0)
    b = _side_by_side([x.b for x in additions], 1)
    features = _Projection.apply(hidden, a, _dtype(hidden, a))  # type: ignore[no-untyped-call]
    parts = features.split([x.a.size(0) for x in additions], 1)
    scaled = [part * x.scale for part, x in zip(parts, additions, strict=True)]
    return LowRankFactors(_side_by_side(scaled, 1), b)


def _side_by_side(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _dtype(hidden: Tensor, a: Tensor) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, a.dtype)
    # torch's autocast leaves float64 alone
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


class _Projection(torch.autograd.Function):
    """hidden [N, H] @ a.T [H, R] in `dtype`; casts of hidden are made anew, not kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, a)
        ctx.dtype = dtype
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.to(dtype) @ a.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, a = ctx.saved_tensors
        of_hidden = of_a = None
        with torch.autocast(hidden.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_hidden = (gradient @ a.to(ctx.dtype)).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                of_a = (gradient.t() @ hidden.to(ctx.dtype)).to(a.dtype)
        return of_hidden, of_a, None
