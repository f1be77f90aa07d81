"""Forward pass: all logits folded into statistics of their rows."""

from __future__ import annotations

from torch import Tensor

from ..kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch, fold_tile_triton
from ..kernels.lm_head_fold_product import fold_product_triton, partial_bytes
from .planner import TilePlan, plan_products
from .statistics import finish_statistics
from .tiles import (
    HeadInputs,
    TileWalk,
    head_plan,
    slice_or_none,
    tile_cost,
    use_products,
    use_triton,
)


def run_forward(
    inputs: HeadInputs,
    targets: Tensor,
    names: tuple[str, ...],
    scratch_bytes: int | None,
    backend: str,
    logits: Tensor | None = None,
) -> dict[str, Tensor]:
    """The outputs `names` of each row, [N], with those that the backward needs.

    `targets` [N] int64 in [0, V). The raw logits of the first rows are written into `logits`
    [k, V or more], which counts as scratch.
    """
    folded = folded_for(names)
    sums = empty_statistics(inputs, folded)
    if scratch_bytes is not None and logits is not None:
        scratch_bytes -= logits.numel() * logits.element_size()
    fold_tiles(inputs, targets, sums, folded, scratch_bytes, backend, logits)
    return finish_statistics(sums, inputs.weight.size(0), names)


def folded_for(names: tuple[str, ...]) -> Folded:
    """What to fold for some outputs."""
    return Folded(
        entropy="entropy" in names,
        squares="log_sum_sq_probs" in names,
        mean="mean_logits" in names,
        top1="is_top1" in names,
    )


def empty_statistics(inputs: HeadInputs, folded: Folded) -> RowStatistics:
    """Statistics of the inputs' rows before any logit."""
    rows, device = inputs.hidden.size(0), inputs.hidden.device
    return RowStatistics.empty(rows, folded, inputs.statistics_dtype, device)


def fold_tiles(
    inputs: HeadInputs,
    targets: Tensor,
    sums: RowStatistics,
    folded: Folded,
    scratch_bytes: int | None,
    backend: str,
    keep: Tensor | None = None,
) -> None:
    """Fold all logits into the empty `sums`, in place; copy those of the first rows to `keep`."""
    if not inputs.hidden.size(0):
        return
    if keep is None and use_products(backend, inputs):
        plan = _products_plan(inputs, folded, scratch_bytes)
        if plan is not None:
            _fold_products(inputs, targets, sums, folded, plan)
            return
    triton = use_triton(backend, inputs)
    fold = fold_tile_triton if triton else fold_tile_torch
    cost = tile_cost(inputs, triton, backward=False, weight_block=False)
    walk = TileWalk(inputs, head_plan(inputs, "forward", cost, scratch_bytes))
    # sliced once: slicing anew for every tile would cost more than launching its kernels
    parts = [
        (
            first,
            last,
            targets[first:last],
            slice_or_none(inputs.temperature, first, last),
            sums.rows(first, last),
        )
        for first, last in walk.row_blocks()
    ]
    for start, end, block in walk.vocabulary_blocks():
        bias = slice_or_none(inputs.bias, start, end)
        for first, last, wanted, temperature, part in parts:
            logits = walk.logits(first, last, block)
            if keep is not None and first < keep.size(0):
                rows = keep[first:last, start:end]
                rows.copy_(logits[: rows.size(0)])
            fold(logits, bias, wanted, temperature, part, start, inputs.transform, folded)


def _products_plan(
    inputs: HeadInputs, folded: Folded, scratch_bytes: int | None
) -> TilePlan | None:
    rows, vocabulary, cast = inputs.hidden.size(0), inputs.weight.size(0), inputs.block_bytes
    device = inputs.hidden.device.type
    return plan_products(rows, vocabulary, cast, partial_bytes(folded), device, scratch_bytes)


def _fold_products(
    inputs: HeadInputs, targets: Tensor, sums: RowStatistics, folded: Folded, plan: TilePlan
) -> None:
    """`fold_tiles` where no logit needs to leave its product: scratch for casts and sums alone."""
    hidden, vocabulary = inputs.product_hidden(), inputs.weight.size(0)
    room = inputs.product_room(plan.columns)
    for start in range(0, vocabulary, plan.columns):
        block = inputs.product_block(start, min(start + plan.columns, vocabulary), room)
        bias = slice_or_none(inputs.bias, start, start + plan.columns)
        for first in range(0, hidden.size(0), plan.rows):
            rows = slice(first, min(first + plan.rows, hidden.size(0)))
            part = inputs.rows(rows.start, rows.stop)
            fold_product_triton(
                hidden[rows],
                block,
                bias,
                targets[rows],
                part.temperature,
                sums.rows(rows.start, rows.stop),
                start,
                inputs.transform,
                folded,
            )
