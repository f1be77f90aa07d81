"""One pass over chunks of rows with all of the vocabulary: statistics, then gradients in place.

Once a chunk's logits are folded, its softmax is known, and the logits that are still there turn
into their own gradient: nothing is recomputed. The upstream gradients must be known beforehand, up
to a factor: 1 for each log-probability where the weight is frozen (the backward scales the rows),
the caller's expectation otherwise. Hopper's kernels keep exponentials in place of logits
(`exponentials`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch, fold_tile_triton
from ..kernels.lm_head_gradient import RowCoefficients, gradient_tile_torch, gradient_tile_triton
from ..kernels.lm_head_target import target_coefficients_torch, target_coefficients_triton
from .chunk_gradients import PassGradients
from .chunk_walk import ChunkWalk
from .chunks import Keep, accumulates_in_halves, keeps_exponentials
from .exponentials import Upstream, exponential_gradients
from .forward import empty_statistics, fold_tiles, folded_for
from .statistics import finish_statistics, normalise, power_of_two, row_coefficients
from .tiles import HeadInputs, use_products, use_triton

# outputs of rows [first, last) and these bounds -> expected gradients of those rows
Expect = Callable[[Mapping[str, Tensor], int, int], Mapping[str, Tensor]]


class GradientSource(Protocol):
    """Knows the upstream gradients of each row."""

    def coefficients(
        self, sums: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        """Coefficients of rows [first, last), whose logits have these sums, and what they were
        divided by (float16)."""

    def upstream(self, sums: RowStatistics, first: int, last: int) -> Upstream:
        """The upstream gradients themselves."""


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

    def coefficients(
        self, sums: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        rows = self._rows.rows(first, last)
        self._fill(sums, rows)
        if self._apart:
            rows.target_rest.zero_()
        return rows, self._power

    def upstream(self, sums: RowStatistics, first: int, last: int) -> Upstream:
        return Upstream(None, {"log_probs": self._rows.target[first:last]})


class ExpectedSource:
    """Gradients of any outputs, asked for when a chunk's own outputs are known."""

    def __init__(self, inputs: HeadInputs, names: tuple[str, ...], expect: Expect) -> None:
        self._inputs = inputs
        self._names = names
        self._expect = expect

    def coefficients(
        self, sums: RowStatistics, first: int, last: int
    ) -> tuple[RowCoefficients, Tensor | None]:
        outputs, expected = self.upstream(sums, first, last)
        assert outputs is not None
        coefficients = row_coefficients(outputs, expected, self._inputs.weight.size(0))
        if self._inputs.compute_dtype != torch.float16:
            return coefficients, None
        return normalise(coefficients, self._inputs.rows(first, last).slope)

    def upstream(self, sums: RowStatistics, first: int, last: int) -> Upstream:
        outputs = finish_statistics(sums, self._inputs.weight.size(0), self._names)
        return Upstream(outputs, self._expect(outputs, first, last))


def run_single_pass(
    inputs: HeadInputs,
    targets: Tensor,
    names: tuple[str, ...],
    source: GradientSource,
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
    source: GradientSource,
    keep: Keep,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Fold the inputs' rows, the first ones of `targets` and `sums`, and make their gradients."""
    triton = use_triton(backend, inputs)
    # so that the outputs are those of a forward that keeps nothing, to the last bit
    products = use_products(backend, inputs)
    walk = ChunkWalk(inputs, keep.plan(inputs, triton, scratch_bytes))
    if products and keeps_exponentials(inputs):
        return exponential_gradients(walk, targets, sums, folded, source.upstream, keep)
    fold = fold_tile_triton if triton else _fold_copy
    gradient_of = gradient_tile_triton if triton else gradient_tile_torch
    buffer = walk.gradient_buffer()
    halves = accumulates_in_halves(inputs, triton) and walk.plan.rows < inputs.hidden.size(0)
    gradients = PassGradients(walk, keep, targets, sums, halves)
    for _, _, weight in walk.vocabulary_blocks():  # a single one
        for first, last in walk.row_blocks():
            part = sums.rows(first, last)
            common = (inputs.bias, targets[first:last], inputs.rows(first, last).temperature)
            if products:
                logits = walk.room(first, last, weight)
                walk.fold_products((first, last), weight, common[1], part, folded, logits)
            else:
                logits = walk.logits(first, last, weight)
                fold(logits, *common, part, 0, inputs.transform, folded)
            coefficients, power = source.coefficients(part, first, last)
            tile = walk.gradient_tile(buffer, logits)
            gradient_of(logits, *common, coefficients, 0, inputs.transform, tile)
            gradients.add(tile, first, last, weight, power)
    return gradients.finish()


def _fold_copy(tile: Tensor, *arguments: object) -> None:
    """The torch twin destroys its tile, which the gradient still needs."""
    fold_tile_torch(tile.clone(), *arguments)  # type: ignore[arg-type]
