"""One pass over chunks of rows with all of the vocabulary: statistics, then gradients in place.

Once a chunk's logits are folded, its softmax is known, and the logits that are still there turn
into their own gradient: nothing is recomputed. The upstream gradients must be known beforehand, up
to a factor: 1 for each log-probability where the weight is frozen (the backward scales the rows),
the caller's expectation otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch, fold_tile_triton
from ..kernels.lm_head_fold_product import fold_product_triton
from ..kernels.lm_head_gradient import RowCoefficients, gradient_tile_torch, gradient_tile_triton
from ..kernels.lm_head_target import target_coefficients_torch, target_coefficients_triton
from ..kernels.lm_head_weight_gradient import accumulate_halves_triton
from .chunk_walk import ChunkWalk
from .chunks import Keep, accumulates_in_halves
from .forward import empty_statistics, fold_tiles, folded_for
from .gemm import add_product, product_into
from .low_rank_inputs import LowRankGradients
from .normalizer import NormalizerGradients
from .statistics import finish_statistics, normalise, power_of_two, row_coefficients
from .tiles import HeadInputs, slice_or_none, use_products, use_triton

# outputs of rows [first, last) and these bounds -> expected gradients of those rows
Expect = Callable[[Mapping[str, Tensor], int, int], Mapping[str, Tensor]]


class CoefficientSource(Protocol):
    """Knows the upstream gradients of each row."""

    def __call__(
        self, sums: RowStatistics, own: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        """Coefficients of rows [first, last), and what they were divided by (float16).

        `sums` are those of the outputs, `own` those of the logits that turn into their gradient.
        """


class TargetSource:
    """Only log_probs has a gradient, `target` [N], known beforehand.

    `apart`: the target's own logit is left out.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        target: Tensor,
        power: Tensor | None,
        backend: str,
        apart: bool = False,
    ) -> None:
        self._power = power
        self._apart = apart
        triton = use_triton(backend, inputs)
        self._fill = target_coefficients_triton if triton else target_coefficients_torch
        zeros = torch.zeros_like(target)
        self._rows = RowCoefficients(
            centre=torch.empty_like(target),
            inverse_sum=torch.empty_like(target),
            log_sum=zeros,  # not read: it belongs to log_linear
            linear=zeros,
            target=target,
            target_rest=torch.empty_like(target),
            log_linear=None,
            square=None,
            constant=None,
        )

    @classmethod
    def unit(cls, inputs: HeadInputs, rows: int, apart: bool, backend: str) -> TargetSource:
        """A gradient of 1 for every row."""
        power = None
        dtype, device = inputs.statistics_dtype, inputs.hidden.device
        target = torch.ones(rows, dtype=dtype, device=device)
        if inputs.compute_dtype == torch.float16:
            power = power_of_two((target * inputs.slope).abs().amax())
            target = target / power
        return cls(inputs, target, power, backend, apart)

    def __call__(
        self, sums: RowStatistics, own: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        rows = self._rows.rows(first, last)
        self._fill(own, rows)
        if self._apart:
            rows.target_rest.zero_()
        return rows, self._power


class ExpectedSource:
    """Gradients of any outputs, asked for when a chunk's own outputs are known."""

    def __init__(self, inputs: HeadInputs, names: tuple[str, ...], expect: Expect) -> None:
        self._inputs = inputs
        self._names = names
        self._expect = expect

    def __call__(
        self, sums: RowStatistics, own: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        vocabulary = self._inputs.weight.size(0)
        outputs = finish_statistics(sums, vocabulary, self._names)
        expected = self._expect(outputs, first, last)
        if own is not sums:
            outputs = finish_statistics(own, vocabulary, self._names)
        coefficients = row_coefficients(outputs, expected, vocabulary)
        if self._inputs.compute_dtype != torch.float16:
            return coefficients, None
        return normalise(coefficients, self._inputs.rows(first, last).slope)


def run_single_pass(
    inputs: HeadInputs,
    targets: Tensor,
    names: tuple[str, ...],
    source: CoefficientSource,
    keep: Keep,
    active: int,
    scratch_bytes: int | None,
    backend: str,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The outputs `names` of each row [N], and the gradients to keep.

    The gradients are those of hidden [active, H], weight [V, H], bias [V] and the factors of a
    low-rank addition, [active, R] and [V, R]; only the first `active` > 0 rows have one.
    """
    folded = folded_for(names)
    sums = empty_statistics(inputs, folded)
    total = inputs.hidden.size(0)
    if active < total:  # first, before the accumulators take their memory
        rest = (inputs.rows(active, total), targets[active:], sums.rows(active, total))
        fold_tiles(*rest, folded, scratch_bytes, backend)
    busy = inputs.rows(0, active)
    kept = _make_gradients(busy, targets, sums, folded, source, keep, scratch_bytes, backend)
    return finish_statistics(sums, inputs.weight.size(0), names), kept


def _make_gradients(
    inputs: HeadInputs,
    targets: Tensor,
    sums: RowStatistics,
    folded: Folded,
    source: CoefficientSource,
    keep: Keep,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Fold the inputs' rows, the first ones of `targets` and `sums`, and make their gradients."""
    triton = use_triton(backend, inputs)
    # so that the outputs are those of a forward that keeps nothing, to the last bit
    products = use_products(backend, inputs)
    # p of rounded logits must add up to 1: the gradient takes the sums of those
    rounded = products and inputs.tile_dtype != inputs.statistics_dtype
    own = empty_statistics(inputs, folded) if rounded else sums
    fold = fold_tile_triton if triton else _fold_copy
    gradient_of = gradient_tile_triton if triton else gradient_tile_torch
    plan = keep.plan(inputs, triton, scratch_bytes)
    walk = ChunkWalk(inputs, plan)
    buffer = walk.gradient_buffer()
    gradients: ChunkGradients | NormalizerGradients
    if keep.normalizer:
        gradients = NormalizerGradients(inputs, keep, targets, own)
    else:
        several = plan.rows < inputs.hidden.size(0)
        gradients = ChunkGradients(inputs, keep, several and accumulates_in_halves(inputs, triton))
    added = None
    if inputs.low is not None:
        needs = (keep.low_hidden, keep.low_weight)
        added = LowRankGradients(inputs.low, needs, inputs.statistics_dtype)
    for start, end, weight in walk.vocabulary_blocks():  # a single one
        for first, last in walk.row_blocks():
            part = sums.rows(first, last)
            own_part = part if own is sums else own.rows(first, last)
            common = (inputs.bias, targets[first:last], inputs.rows(first, last).temperature)
            if products:
                logits = walk.room(first, last, weight)
                _fold_products(walk, weight, (first, last), common, part, folded, logits)
            else:
                logits = walk.logits(first, last, weight)
            if rounded or not products:
                fold(logits, *common, own_part, 0, inputs.transform, folded)
            coefficients, power = source(part, own_part, first, last)
            tile = walk.gradient_tile(buffer, logits)
            gradient_of(logits, *common, coefficients, 0, inputs.transform, tile)
            gradients.add(tile, first, last, weight, walk.own_hidden(first, last), power)
            if added is not None and walk.low is not None:
                low = walk.low.rows(first, last)
                added.add(tile, (first, last), (start, end), low, power)
    return [*gradients.finish(), *([] if added is None else added.finish())]


def _fold_products(
    walk: ChunkWalk,
    weight: Tensor,
    rows: tuple[int, int],
    common: tuple[Tensor | None, Tensor, Tensor | None],
    sums: RowStatistics,
    folded: Folded,
    logits: Tensor,
) -> None:
    """Fold the logits of some rows while they are made, and keep them."""
    hidden, (bias, targets, temperature) = walk.hidden[rows[0] : rows[1]], common
    for start, end, part in walk.parts(weight):
        fold_product_triton(
            hidden,
            part,
            slice_or_none(bias, start, end),
            targets,
            temperature,
            sums,
            start,
            walk.inputs.transform,
            folded,
            logits[:, start:end],
        )


def _fold_copy(tile: Tensor, *arguments: object) -> None:
    """The torch twin destroys its tile, which the gradient still needs."""
    fold_tile_torch(tile.clone(), *arguments)  # type: ignore[arg-type]


class ChunkGradients:
    """The gradients that are needed while chunks of rows are added to them, in order.

    `halves`: the weight's is of 16 bits, and the lower halves of its float32 sums lie beside it.
    """

    def __init__(self, inputs: HeadInputs, keep: Keep, halves: bool) -> None:
        hidden, weight = inputs.hidden, inputs.weight
        self._rows = hidden.size(0)
        self._lower: Tensor | None = None
        self._dtype = inputs.statistics_dtype
        self._power: Tensor | None = None
        self._hidden = self._weight = self._bias = None
        if keep.hidden:
            dtype = keep.hidden_dtype(hidden.dtype, inputs.compute_dtype)
            self._hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        if keep.weight is not None:
            self._weight = torch.empty(weight.shape, dtype=keep.weight, device=weight.device)
            if halves:
                self._lower = torch.empty(weight.shape, dtype=torch.int16, device=weight.device)
        if keep.bias:
            self._bias = torch.zeros(weight.size(0), dtype=self._dtype, device=weight.device)

    def add(
        self,
        tile: Tensor,
        first: int,
        last: int,
        weight: Tensor,
        hidden: Tensor,
        power: Tensor | None,
    ) -> None:
        """Add a chunk's gradient of logits [c, V], divided by `power`."""
        if self._hidden is not None:
            rows = self._hidden[first:last]
            product_into(rows, tile, weight)
            if power is not None:
                rows.mul_(power)
        if power is not None and self._power is not None:  # the sums move to the new unit
            for sums in (self._weight, self._bias):
                if sums is not None and first:
                    sums.mul_(self._power / power)
        self._power = power
        if self._weight is not None and self._lower is not None:
            bounds = (first == 0, last == self._rows)
            accumulate_halves_triton(tile, hidden, self._weight, self._lower, *bounds)
        elif self._weight is not None:
            write = add_product if first else product_into
            write(self._weight, tile.t(), hidden)
        if self._bias is not None:
            self._bias += tile.sum(0, dtype=self._dtype)

    def finish(self) -> list[Tensor]:
        """The gradients."""
        if self._power is not None:
            for sums in (self._weight, self._bias):
                if sums is not None:
                    sums.mul_(self._power)
        return [x for x in (self._hidden, self._weight, self._bias) if x is not None]
