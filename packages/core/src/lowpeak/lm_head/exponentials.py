"""The single pass on Hopper: a chunk's exponentials are kept, and serve as its gradient.

See `lowpeak.kernels.lm_head_exponentials`. Where log_probs alone has a gradient, and hidden and
weight alone need one, rows of products with the exponentials are scaled and no pass turns them into
gradients of logits; elsewhere one does, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.hopper_products import BLOCK_V
from ..kernels.lm_head_exponential_rows import guess_units_triton, scale_exponentials_triton
from ..kernels.lm_head_exponentials import Exponentials, finish_exponentials_triton
from ..kernels.lm_head_fold import Folded, RowStatistics
from ..kernels.lm_head_fold_product import SPAN_COLUMNS
from ..kernels.lm_head_gradient import RowCoefficients, gradient_tile_triton
from .chunk_gradients import PassGradients, ScaledChunk
from .chunk_walk import ChunkWalk
from .chunks import Keep, accumulates_in_halves
from .statistics import finish_statistics, row_coefficients
from .tiles import HeadInputs


class Upstream(NamedTuple):
    """Upstream gradients of a chunk's outputs, by name, and the outputs where they were needed."""

    outputs: Mapping[str, Tensor] | None
    gradients: Mapping[str, Tensor]


def exponential_gradients(
    walk: ChunkWalk,
    targets: Tensor,
    sums: RowStatistics,
    folded: Folded,
    upstream_of: Callable[[RowStatistics, int, int], Upstream],
    keep: Keep,
) -> list[Tensor]:
    """Fold the walk's rows into `sums` and make their gradients."""
    inputs, vocabulary = walk.inputs, walk.inputs.weight.size(0)
    # what the gradient of log_normalizer takes from the rounded exponentials
    own = RowStatistics.empty(sums.target.size(0), Folded(), torch.float32, targets.device)
    gradients = PassGradients(walk, keep, targets, own, accumulates_in_halves(inputs, True))
    of_logits = keep.normalizer or keep.bias or inputs.low is not None
    for _, _, weight in walk.vocabulary_blocks():  # a single one
        for first, last in walk.row_blocks():
            part, wanted = sums.rows(first, last), targets[first:last]
            kept = _room(walk, weight, wanted, first, last)
            walk.fold_products((first, last), weight, wanted, part, folded, kept)
            outputs, upstream = upstream_of(part, first, last)
            alone = not of_logits and tuple(upstream) == ("log_probs",)
            others = finish_exponentials_triton(kept, wanted, part.target, not alone)
            if alone:
                temperature = inputs.rows(first, last).temperature
                sides = (others, kept.unit, part.target, upstream["log_probs"])
                factors = scale_exponentials_triton(*sides, temperature, inputs.transform)
                gradients.add_scaled(ScaledChunk(kept.tile, wanted, *factors), first, last, weight)
                continue
            total = others + torch.exp(part.target - kept.unit)
            if keep.normalizer:
                mine = own.rows(first, last)
                mine.maximum.copy_(kept.unit)
                mine.sum_exp.copy_(others)
                mine.target.copy_(part.target)
            if outputs is None:
                outputs = finish_statistics(part, vocabulary, ())
            outputs = {**outputs, "centre": kept.unit, "sum_exp": total}
            coefficients = row_coefficients(outputs, upstream, vocabulary)
            rest = coefficients.target * (others / total)
            if keep.normalizer:
                rest.zero_()
            _turn(inputs, kept.tile, wanted, replace(coefficients, target_rest=rest), first, last)
            gradients.add(kept.tile, first, last, weight, None)
    return gradients.finish()


def _room(walk: ChunkWalk, weight: Tensor, targets: Tensor, first: int, last: int) -> Exponentials:
    """Room for the exponentials of rows [first, last), in units by their targets' logits."""
    inputs, vocabulary, rows = walk.inputs.rows(first, last), weight.size(0), last - first
    hidden = walk.own_hidden(first, last)
    rest = (inputs.bias, targets, inputs.temperature, inputs.transform)
    unit = guess_units_triton(hidden, weight, *rest)
    blocks, spans = -(-vocabulary // BLOCK_V), -(-vocabulary // SPAN_COLUMNS)
    excess, sums = (torch.empty((n, rows), device=unit.device) for n in (blocks, spans))
    return Exponentials(walk.room(first, last, weight), unit, excess, sums)


def _turn(
    inputs: HeadInputs,
    tile: Tensor,
    targets: Tensor,
    coefficients: RowCoefficients,
    first: int,
    last: int,
) -> None:
    """Turn exponentials into the gradient of their logits, in place."""
    temperature = inputs.rows(first, last).temperature
    rest = (inputs.bias, targets, temperature, coefficients, 0, inputs.transform)
    gradient_tile_triton(tile, *rest, tile, exponentials=True)
