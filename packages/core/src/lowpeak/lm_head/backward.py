"""Backward pass: logits recomputed tile by tile, the vocabulary outside.

Each block of the weight's gradient is then complete before the next one starts: one product over
all rows where they fit one tile, else a float32 block of its own. There is no float32 [V, H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.lm_head_gradient import RowCoefficients, gradient_tile_torch, gradient_tile_triton
from ..kernels.lm_head_gradient_product import gradient_product_triton
from .gemm import add_product, product_into
from .low_rank_inputs import LowRankFactors, LowRankGradients
from .planner import NOTHING, TileCost, TilePlan
from .statistics import normalise
from .tiles import (
    HeadInputs,
    TileWalk,
    head_plan,
    slice_or_none,
    tile_cost,
    use_products,
    use_triton,
)


def run_backward(
    inputs: HeadInputs,
    targets: Tensor,
    coefficients: RowCoefficients,
    needs: Sequence[bool],
    logits: Tensor | None,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of hidden [N, H], weight [V, H], bias [V] and both factors of `inputs.low`, in
    their own dtypes, those that are needed.

    `logits` [k, V or more]: the raw ones of the first rows, which are not recomputed then.
    """
    power = None
    if inputs.compute_dtype == torch.float16 and inputs.hidden.size(0):
        coefficients, power = normalise(coefficients, inputs.slope)
    gradients = HeadGradients(inputs, (needs[0], needs[1], needs[2]), power)
    added = None
    if inputs.low is not None:
        added = LowRankGradients(inputs.low, (needs[3], needs[4]), inputs.statistics_dtype)
    if inputs.hidden.size(0) == 0:
        return [*_present(gradients.zeros()), *_low_rank_results(inputs, added, needs)]
    products = logits is None and use_products(backend, inputs)
    triton = use_triton(backend, inputs)
    gradient_of = gradient_tile_triton if triton else gradient_tile_torch
    walk = gradients.plan(triton, scratch_bytes, products=products)
    walk.kept = logits
    buffer = None if products else walk.gradient_buffer()
    parts = [
        (
            first,
            last,
            targets[first:last],
            slice_or_none(inputs.temperature, first, last),
            coefficients.rows(first, last),
        )
        for first, last in walk.row_blocks()
    ]
    for start, end, block in walk.vocabulary_blocks():
        bias = slice_or_none(inputs.bias, start, end)
        for first, last, wanted, temperature, part in parts:
            rest = (bias, wanted, temperature, part, start, inputs.transform)
            hidden = walk.hidden[first:last]
            if products:
                tile = walk.room(first, last, block)
                gradient_product_triton(hidden, block, *rest, tile)
            else:
                raw = walk.logits(first, last, block)
                tile = walk.gradient_tile(buffer, raw)
                gradient_of(raw, *rest, tile)
            bounds = ((first, last), (start, end))
            if inputs.low is None or added is None:
                gradients.add(tile, *bounds, block, hidden)
            else:
                (own_hidden, u), (own_block, b) = (_parts(x, inputs) for x in (hidden, block))
                gradients.add(tile, *bounds, own_block, own_hidden)
                added.add(tile, *bounds, LowRankFactors(u, b), power)
        gradients.finish_block(start, end)
    return [*_present(gradients.finish()), *_low_rank_results(inputs, added, needs)]


def _present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in gradients if x is not None]


def _parts(joined: Tensor, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """What was put together: of the head itself, and of its low-rank addition."""
    assert inputs.low is not None
    width = inputs.weight.size(1)
    return joined[:, :width], joined[:, width : width + inputs.low.rank]


def _low_rank_results(
    inputs: HeadInputs, added: LowRankGradients | None, needs: Sequence[bool]
) -> list[Tensor]:
    if inputs.low is None or added is None:
        return []
    owners = [x for x, need in zip(inputs.low, needs[3:], strict=True) if need]
    return [x.to(owner.dtype) for x, owner in zip(added.finish(), owners, strict=True)]


class HeadGradients:
    """The three gradients while tiles are added to them, vocabulary blocks in order."""

    def __init__(
        self, inputs: HeadInputs, needs: tuple[bool, bool, bool], power: Tensor | None
    ) -> None:
        self._inputs = inputs
        self._needs = needs
        self._power = power
        self._dtype = inputs.statistics_dtype
        self._hidden: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._block: Tensor | None = None

    def plan(
        self,
        triton: bool,
        scratch_bytes: int | None,
        beside: TileCost = NOTHING,
        products: bool = False,
    ) -> TileWalk:
        """Choose the tiles and allocate the results and the accumulators that they make necessary.

        A block of the weight's gradient needs an accumulator where the weight's own dtype is too
        narrow for one and the rows take more than one tile. `beside` is the cost of what else needs
        scratch for each tile. `products`: tiles hold gradients only.
        """
        inputs = self._inputs
        narrow = self._needs[1] and inputs.weight.dtype != self._dtype
        block = narrow and not self._direct(inputs.weight.dtype)
        cost = tile_cost(inputs, triton, not products, block) + beside
        plan = head_plan(inputs, "backward", cost, scratch_bytes)
        if narrow and plan.rows < inputs.hidden.size(0):
            block = True
            cost = tile_cost(inputs, triton, not products, block) + beside
            plan = head_plan(inputs, "backward", cost, scratch_bytes)
        self._allocate(plan, block)
        return TileWalk(inputs, plan, products=products)

    def _direct(self, dtype: torch.dtype) -> bool:
        """Whether a single product can be written as the result, rounded once to `dtype`."""
        return self._power is None and dtype == self._inputs.compute_dtype

    def zeros(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What an empty batch gives: zero, not missing, gradients."""
        inputs = self._inputs
        tensors = (inputs.hidden, inputs.weight, inputs.bias)
        hidden, weight, bias = (
            torch.zeros_like(x) if need and x is not None else None
            for x, need in zip(tensors, self._needs, strict=True)
        )
        return hidden, weight, bias

    def _allocate(self, plan: TilePlan, block: bool) -> None:
        inputs, (need_hidden, need_weight, need_bias) = self._inputs, self._needs
        hidden, weight = inputs.hidden, inputs.weight
        if need_hidden:
            whole = plan.columns >= weight.size(0) and self._direct(hidden.dtype)
            dtype = hidden.dtype if whole else self._dtype
            self._hidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        if need_weight:
            self._weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if block:
            shape = (plan.columns, weight.size(1))
            self._block = torch.empty(shape, dtype=self._dtype, device=weight.device)
        if need_bias:
            self._bias = torch.zeros(weight.size(0), dtype=self._dtype, device=weight.device)

    def add(
        self,
        tile: Tensor,
        rows: tuple[int, int],
        columns: tuple[int, int],
        block: Tensor,
        hidden: Tensor,
    ) -> None:
        """Add the products of a tile [n, v] with its weight block [v, H] and hidden rows [n, H]."""
        if self._hidden is not None:
            write = product_into if columns[0] == 0 else add_product
            write(self._hidden[rows[0] : rows[1]], tile, block)
        if self._weight is not None:
            write = product_into if rows[0] == 0 else add_product
            write(self._weight_rows(*columns), tile.t(), hidden)
        if self._bias is not None:
            self._bias[columns[0] : columns[1]] += tile.sum(0, dtype=self._dtype)

    def _weight_rows(self, start: int, end: int) -> Tensor:
        assert self._weight is not None
        return self._weight[start:end] if self._block is None else self._block[: end - start]

    def finish_block(self, start: int, end: int) -> None:
        """Write a vocabulary block's weight gradient, rounded once."""
        if self._weight is None:
            return
        rows = self._weight_rows(start, end)
        if self._power is not None:
            rows.mul_(self._power)
        if self._block is not None:
            self._weight[start:end].copy_(rows)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of what they belong to."""
        inputs = self._inputs
        if self._power is not None:
            for accumulator in (self._hidden, self._bias):
                if accumulator is not None:
                    accumulator.mul_(self._power)
        hidden = None if self._hidden is None else self._hidden.to(inputs.hidden.dtype)
        bias = None
        if self._bias is not None and inputs.bias is not None:
            bias = self._bias.to(inputs.bias.dtype)
        return hidden, self._weight, bias
