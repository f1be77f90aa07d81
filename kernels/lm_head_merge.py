"""Merge the sums that a fold made of spans of the vocabulary into those of its rows.

One launch in place of a dozen: between two products of a chunk of 512 rows, a millisecond of an
H200, the host has no time for more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .lm_head_fold import RowStatistics
from .triton_shim import jit, tl

_ROWS, _SPANS, _WARPS = 16, 64, 4


def merge_spans_torch(parts: dict[str, Tensor], statistics: RowStatistics) -> None:
    """Add the sums of each span [spans, n], by the names of `statistics`, to these [n], in place.

    `maximum` and `sum_exp` are among them.
    """

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(statistics, name).unsqueeze(0), parts[name]])

    maxima, sums = all_of("maximum"), all_of("sum_exp")
    merged = maxima.amax(0)
    shift = maxima - torch.where(merged == -float("inf"), 0.0, merged)
    shrink = shift.exp()
    if "centred" in parts:
        moved = torch.where(maxima == -float("inf"), 0.0, shift) * sums
        statistics.centred.copy_(((all_of("centred") + moved) * shrink).sum(0))
    if "squares" in parts:
        statistics.squares.copy_((all_of("squares") * shrink.square()).sum(0))
    if "total" in parts:
        statistics.total.copy_(all_of("total").sum(0))
    if "maximum_before" in parts:
        statistics.maximum_before.copy_(all_of("maximum_before").amax(0))
    statistics.maximum.copy_(merged)
    statistics.sum_exp.copy_((sums * shrink).sum(0))


@jit
def lm_head_merge_kernel(
    maximum_parts_ptr,
    sum_exp_parts_ptr,
    centred_parts_ptr,
    squares_parts_ptr,
    total_parts_ptr,
    maximum_before_parts_ptr,
    maximum_ptr,
    sum_exp_ptr,
    centred_ptr,
    squares_ptr,
    total_ptr,
    maximum_before_ptr,
    rows,
    spans,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    MEAN: tl.constexpr,
    TOP1: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    old = tl.load(maximum_ptr + row, mask=inside, other=float("-inf"))
    merged = old
    for first in range(0, spans, SPANS):
        span = first + tl.arange(0, SPANS)
        place = span[:, None].to(tl.int64) * rows + row[None, :]
        mask = (span < spans)[:, None] & inside[None, :]
        maxima = tl.load(maximum_parts_ptr + place, mask=mask, other=float("-inf"))
        merged = tl.maximum(merged, tl.max(maxima, axis=0))
    centre = tl.where(merged == float("-inf"), 0.0, merged)
    shrink = tl.exp(old - centre)
    old_sum = tl.load(sum_exp_ptr + row, mask=inside, other=0.0)
    sum_exp = old_sum * shrink
    if ENTROPY:
        shift = tl.where(old == float("-inf"), 0.0, old - centre)
        centred = tl.load(centred_ptr + row, mask=inside, other=0.0)
        centred = (centred + shift * old_sum) * shrink
    if SQUARES:
        squares = tl.load(squares_ptr + row, mask=inside, other=0.0) * (shrink * shrink)
    if MEAN:
        total = tl.load(total_ptr + row, mask=inside, other=0.0)
    if TOP1:
        before = tl.load(maximum_before_ptr + row, mask=inside, other=float("-inf"))
    for first in range(0, spans, SPANS):
        span = first + tl.arange(0, SPANS)
        place = span[:, None].to(tl.int64) * rows + row[None, :]
        mask = (span < spans)[:, None] & inside[None, :]
        maxima = tl.load(maximum_parts_ptr + place, mask=mask, other=float("-inf"))
        sums = tl.load(sum_exp_parts_ptr + place, mask=mask, other=0.0)
        shrinks = tl.exp(maxima - centre[None, :])
        sum_exp += tl.sum(sums * shrinks, axis=0)
        if ENTROPY:
            shifts = tl.where(maxima == float("-inf"), 0.0, maxima - centre[None, :])
            parts = tl.load(centred_parts_ptr + place, mask=mask, other=0.0)
            centred += tl.sum((parts + shifts * sums) * shrinks, axis=0)
        if SQUARES:
            parts = tl.load(squares_parts_ptr + place, mask=mask, other=0.0)
            squares += tl.sum(parts * (shrinks * shrinks), axis=0)
        if MEAN:
            total += tl.sum(tl.load(total_parts_ptr + place, mask=mask, other=0.0), axis=0)
        if TOP1:
            parts = tl.load(maximum_before_parts_ptr + place, mask=mask, other=float("-inf"))
            before = tl.maximum(before, tl.max(parts, axis=0))
    tl.store(maximum_ptr + row, merged, mask=inside)
    tl.store(sum_exp_ptr + row, sum_exp, mask=inside)
    if ENTROPY:
        tl.store(centred_ptr + row, centred, mask=inside)
    if SQUARES:
        tl.store(squares_ptr + row, squares, mask=inside)
    if MEAN:
        tl.store(total_ptr + row, total, mask=inside)
    if TOP1:
        tl.store(maximum_before_ptr + row, before, mask=inside)


_NAMES = ("maximum", "sum_exp", "centred", "squares", "total", "maximum_before")


def merge_spans_triton(parts: dict[str, Tensor], statistics: RowStatistics) -> None:
    """`merge_spans_torch` as one kernel launch; everything is float32."""
    spans, rows = parts["maximum"].shape
    lm_head_merge_kernel[(-(-rows // _ROWS),)](
        *(parts.get(name) for name in _NAMES),
        *(getattr(statistics, name) for name in _NAMES),
        rows,
        spans,
        ENTROPY="centred" in parts,
        SQUARES="squares" in parts,
        MEAN="total" in parts,
        TOP1="maximum_before" in parts,
        ROWS=_ROWS,
        SPANS=_SPANS,
        num_warps=_WARPS,
    )


def _variant(everything: bool) -> tuple[str, dict[str, str], Any, int]:
    flags = dict.fromkeys(("ENTROPY", "SQUARES", "MEAN", "TOP1"), everything)
    constants: dict[str, object] = {**flags, "ROWS": _ROWS, "SPANS": _SPANS}
    types = {f"{name}_ptr": "*fp32" for name in _NAMES} | {"rows": "i32", "spans": "i32"}
    for name in _NAMES:
        if everything or name in ("maximum", "sum_exp"):
            types[f"{name}_parts_ptr"] = "*fp32"
        else:
            constants[f"{name}_parts_ptr"] = None
    return ("lm_head_merge_kernel", types, constants, _WARPS)


AOT_VARIANTS = [_variant(False), _variant(True)]
