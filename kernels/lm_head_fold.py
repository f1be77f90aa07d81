"""Fold a tile of raw logits into running softmax statistics, one row a program.

The target's column is left out of the sums and kept apart: with L = logsumexp of the other logits,
log p(target) = -softplus(L - z_target) keeps its relative accuracy when p(target) approaches 1.
Sums are centred on the running maximum of the other logits, so that the entropy does not cancel at
large logit offsets and a logit of -inf contributes 0, never 0 * inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .logit_transform import TileTransform, transform_block, transform_tile_torch
from .triton_shim import jit, tl

NEGATIVE_INFINITY = -float("inf")


@dataclass(frozen=True)
class FoldLaunch:
    """How one program reads its row: `block` columns at a time, `group` neighbours a lane."""

    group: int = 8
    block: int = 1024
    warps: int = 2


# A program a row: few rows must keep more bytes in flight each to fill a GPU.
_MANY_ROWS = FoldLaunch()
_FEW_ROWS = FoldLaunch(block=8192, warps=8)
_FEW = 2048


def fold_launch(rows: int, width: int) -> FoldLaunch:
    """The launch for a tile of this size."""
    return _FEW_ROWS if rows <= _FEW and width > _FEW_ROWS.block else _MANY_ROWS


@dataclass(frozen=True)
class Folded:
    """Which statistics are folded beside maximum, sum_exp and target."""

    entropy: bool = False
    squares: bool = False
    mean: bool = False
    top1: bool = False


@dataclass(frozen=True)
class RowStatistics:
    """Running statistics of N rows over the vocabulary seen so far, each [N], float32 or float64.

    m is the largest of the logits other than the target's. A statistic that was not asked for is an
    empty tensor.
    """

    maximum: Tensor  # m
    sum_exp: Tensor  # sum_j exp(z_j - m), target left out
    target: Tensor  # z_target
    centred: Tensor  # sum_j exp(z_j - m) (z_j - m), target left out
    squares: Tensor  # sum_j exp(2 (z_j - m)), target left out
    total: Tensor  # sum_j z_j, target included
    maximum_before: Tensor  # largest logit of a column before the target's

    @classmethod
    def empty(
        cls, rows: int, folded: Folded, dtype: torch.dtype, device: torch.device
    ) -> RowStatistics:
        """Statistics of an empty vocabulary."""

        def full(value: float, wanted: bool = True) -> Tensor:
            return torch.full((rows if wanted else 0,), value, dtype=dtype, device=device)

        return cls(
            maximum=full(NEGATIVE_INFINITY),
            sum_exp=full(0.0),
            target=full(NEGATIVE_INFINITY),
            centred=full(0.0, folded.entropy),
            squares=full(0.0, folded.squares),
            total=full(0.0, folded.mean),
            maximum_before=full(NEGATIVE_INFINITY, folded.top1),
        )

    def rows(self, start: int, end: int) -> RowStatistics:
        """Views of rows [start, end)."""
        return RowStatistics(**{name: field[start:end] for name, field in vars(self).items()})


def fold_tile_torch(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    statistics: RowStatistics,
    start: int,
    transform: TileTransform,
    folded: Folded,
) -> None:
    """Fold the raw [n, v] tile of the vocabulary columns from `start` into `statistics`, in place.

    `bias` is the tile's [v] slice, `targets` [n] int64, `temperature` [n]. Destroys the tile.
    """
    z = transform_tile_torch(tile, bias, temperature, transform, statistics.maximum.dtype)
    width = z.size(1)
    inside = (targets >= start) & (targets < start + width)
    position = (targets - start).clamp(0, width - 1).unsqueeze(1)
    hit = z.gather(1, position)
    statistics.target.copy_(torch.where(inside, hit.squeeze(1), statistics.target))
    if folded.mean:
        statistics.total.add_(z.sum(1))
    if folded.top1:
        later = torch.arange(start, start + width, device=z.device) >= targets.unsqueeze(1)
        before = z.masked_fill(later, NEGATIVE_INFINITY).amax(1)
        statistics.maximum_before.copy_(torch.maximum(statistics.maximum_before, before))
    z.scatter_(1, position, torch.where(inside.unsqueeze(1), NEGATIVE_INFINITY, hit))

    old = statistics.maximum
    new = torch.maximum(old, z.amax(1))
    centre = torch.where(new == NEGATIVE_INFINITY, 0.0, new)
    shrink = torch.exp(old - centre)
    z.sub_(centre.unsqueeze(1))
    weights = z.exp()
    if folded.entropy:
        shift = torch.where(statistics.sum_exp > 0, statistics.sum_exp * (old - centre), 0.0)
        added = z.mul_(weights).masked_fill_(weights == 0, 0.0).sum(1)
        statistics.centred.add_(shift).mul_(shrink).add_(added)
    statistics.sum_exp.mul_(shrink).add_(weights.sum(1))
    if folded.squares:
        statistics.squares.mul_(shrink.square()).add_(weights.square_().sum(1))
    statistics.maximum.copy_(new)


@jit
def lm_head_fold_kernel(
    tile_ptr,
    row_stride,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    maximum_ptr,
    sum_exp_ptr,
    target_ptr,
    centred_ptr,
    squares_ptr,
    total_ptr,
    maximum_before_ptr,
    start,
    width,
    scale,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    MEAN: tl.constexpr,
    TOP1: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile_ptr += row * row_stride
    target = tl.load(targets_ptr + row) - start
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)

    if (target >= 0) & (target < width):
        x = tl.load(tile_ptr + target).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + target).to(tl.float32)
        z = transform_block(x, scale, softcap, temperature, HAS_BIAS, HAS_SOFTCAP)
        tl.store(target_ptr + row, z)

    # A lane folds groups of neighbouring columns on its own: no exchange between threads until the
    # end. An H200 reads 8192 x 8192 bf16 tiles at 2.2 TB/s so (1.7 with entropy and top1), and at
    # 2.1 (1.1) with a maximum over the row in every block.
    lanes = tl.arange(0, BLOCK // GROUP)
    within = lanes[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    sum_exp = tl.zeros([BLOCK // GROUP], tl.float32)
    if ENTROPY:
        centred = tl.zeros([BLOCK // GROUP], tl.float32)
    if SQUARES:
        squares = tl.zeros([BLOCK // GROUP], tl.float32)
    if MEAN:
        total = tl.zeros([BLOCK // GROUP], tl.float32)
    if TOP1:
        before = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)

    for offset in range(0, width, BLOCK):
        columns = offset + within
        inside = columns < width
        x = tl.load(tile_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        z = transform_block(x, scale, softcap, temperature, HAS_BIAS, HAS_SOFTCAP)
        if MEAN:
            total += tl.sum(tl.where(inside, z, 0.0), axis=1)
        z = tl.where(inside & (columns != target), z, float("-inf"))
        if TOP1 and offset < target:
            earlier = tl.where(columns < target, z, float("-inf"))
            before = tl.maximum(before, tl.max(earlier, axis=1))

        new = tl.maximum(maximum, tl.max(z, axis=1))
        centre = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp(maximum - centre)
        z -= centre[:, None]
        weights = tl.exp(z)
        if ENTROPY:
            shift = tl.where(maximum == float("-inf"), 0.0, maximum - centre)
            # exp(z) is 0 below -104: the bound turns 0 * -inf into 0
            added = tl.sum(weights * tl.maximum(z, -200.0), axis=1)
            centred = (centred + shift * sum_exp) * shrink + added
        if SQUARES:
            squares = squares * (shrink * shrink) + tl.sum(weights * weights, axis=1)
        sum_exp = sum_exp * shrink + tl.sum(weights, axis=1)
        maximum = new

    # Merge the lanes, and what earlier tiles left.
    old = tl.load(maximum_ptr + row)
    merged = tl.maximum(old, tl.max(maximum))
    centre = tl.where(merged == float("-inf"), 0.0, merged)
    shrink = tl.exp(maximum - centre)
    old_shrink = tl.exp(old - centre)
    old_sum = tl.load(sum_exp_ptr + row)
    tl.store(maximum_ptr + row, merged)
    tl.store(sum_exp_ptr + row, old_sum * old_shrink + tl.sum(sum_exp * shrink))
    if ENTROPY:
        shift = tl.where(maximum == float("-inf"), 0.0, maximum - centre)
        old_shift = tl.where(old == float("-inf"), 0.0, old - centre)
        old_centred = (tl.load(centred_ptr + row) + old_shift * old_sum) * old_shrink
        tl.store(centred_ptr + row, old_centred + tl.sum((centred + shift * sum_exp) * shrink))
    if SQUARES:
        old_squares = tl.load(squares_ptr + row) * (old_shrink * old_shrink)
        tl.store(squares_ptr + row, old_squares + tl.sum(squares * (shrink * shrink)))
    if MEAN:
        tl.store(total_ptr + row, tl.load(total_ptr + row) + tl.sum(total))
    if TOP1:
        earlier = tl.load(maximum_before_ptr + row)
        tl.store(maximum_before_ptr + row, tl.maximum(earlier, tl.max(before)))


def fold_tile_triton(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    statistics: RowStatistics,
    start: int,
    transform: TileTransform,
    folded: Folded,
    launch: FoldLaunch | None = None,
) -> None:
    """`fold_tile_torch` as one kernel launch; statistics must be float32. Keeps the tile."""
    launch = launch or fold_launch(*tile.shape)
    lm_head_fold_kernel[(tile.size(0),)](
        tile,
        tile.stride(0),
        bias,
        targets,
        temperature,
        statistics.maximum,
        statistics.sum_exp,
        statistics.target,
        statistics.centred,
        statistics.squares,
        statistics.total,
        statistics.maximum_before,
        start,
        tile.size(1),
        transform.scale,
        transform.softcap,
        transform.temperature,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=transform.softcap != 0.0,
        ROW_TEMPERATURE=temperature is not None,
        ENTROPY=folded.entropy,
        SQUARES=folded.squares,
        MEAN=folded.mean,
        TOP1=folded.top1,
        GROUP=launch.group,
        BLOCK=launch.block,
        num_warps=launch.warps,
    )


def _variant(
    tile: str, bias: str | None = None, *, few_rows: bool = False, **on: bool
) -> tuple[str, dict[str, str], Any, int]:
    launch = _FEW_ROWS if few_rows else _MANY_ROWS
    flags = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "ENTROPY", "SQUARES", "MEAN", "TOP1")
    constants: dict[str, object] = {flag: on.get(flag, False) for flag in flags}
    constants |= {"HAS_BIAS": bias is not None, "GROUP": launch.group}
    constants["BLOCK"] = launch.block
    sums = ("maximum", "sum_exp", "target", "centred", "squares", "total", "maximum_before")
    types = {"tile_ptr": f"*{tile}", "targets_ptr": "*i64"}
    types |= {f"{name}_ptr": "*fp32" for name in sums}
    types |= dict.fromkeys(("row_stride", "start", "width"), "i32")
    types |= dict.fromkeys(("scale", "softcap", "temperature"), "fp32")
    for pointer, kind in (("bias_ptr", bias), ("temperature_ptr", on.get("ROW_TEMPERATURE"))):
        if kind:
            types[pointer] = "*fp32" if kind is True else f"*{kind}"
        else:
            constants[pointer] = None
    return ("lm_head_fold_kernel", types, constants, launch.warps)


_EVERYTHING = dict.fromkeys(
    ("HAS_SOFTCAP", "ROW_TEMPERATURE", "ENTROPY", "SQUARES", "MEAN", "TOP1"), True
)
# float16 logits are folded as float32 tiles
AOT_VARIANTS = [
    _variant("bf16"),
    _variant("bf16", ENTROPY=True, TOP1=True),
    _variant("bf16", ENTROPY=True, TOP1=True, MEAN=True, HAS_SOFTCAP=True),
    _variant("bf16", "bf16", **_EVERYTHING),
    _variant("bf16", "fp32", ENTROPY=True),
    _variant("fp32"),
    _variant("fp32", "fp16", ENTROPY=True),
    _variant("fp32", "fp32", **_EVERYTHING),
    _variant("bf16", few_rows=True),
    _variant("bf16", few_rows=True, ENTROPY=True, TOP1=True),
    _variant("bf16", "bf16", few_rows=True, **_EVERYTHING),
    _variant("fp32", few_rows=True),
    _variant("fp32", "fp32", few_rows=True, **_EVERYTHING),
]
