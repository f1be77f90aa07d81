"""Gradients of a single pass, while chunks of rows are added to them in order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.lm_head_fold import RowStatistics
from ..kernels.lm_head_scaled_rows import scaled_rows_triton
from ..kernels.lm_head_weight_gradient import TargetRows, accumulate_halves_triton
from .chunk_walk import ChunkWalk
from .chunks import Keep
from .gemm import add_product, product_into
from .low_rank_inputs import LowRankGradients
from .normalizer import NormalizerGradients
from .tiles import HeadInputs


class ScaledChunk(NamedTuple):
    """A chunk's gradient of logits in parts: diag(scale) tile, and `rest` for each row's target,
    where the tile is 0.

    tile [c, V] in the compute dtype; targets [c]; scale and rest [c] float32.
    """

    tile: Tensor
    targets: Tensor
    scale: Tensor
    rest: Tensor


class PassGradients:
    """All gradients that a pass keeps. `sums` are those of the rows' logits."""

    def __init__(
        self, walk: ChunkWalk, keep: Keep, targets: Tensor, sums: RowStatistics, halves: bool
    ) -> None:
        inputs = walk.inputs
        self._walk = walk
        self._chunks = self._normalizer = self._low = None
        if keep.normalizer:
            self._normalizer = NormalizerGradients(inputs, keep, targets, sums)
        else:
            several = walk.plan.rows < inputs.hidden.size(0)
            self._chunks = ChunkGradients(inputs, keep, halves, several)
        if inputs.low is not None:
            needs = (keep.low_hidden, keep.low_weight)
            self._low = LowRankGradients(inputs.low, needs, inputs.statistics_dtype)

    def add(
        self, tile: Tensor, first: int, last: int, weight: Tensor, power: Tensor | None
    ) -> None:
        """Add the gradient of logits [c, V] of rows [first, last), divided by `power`."""
        hidden = self._walk.own_hidden(first, last)
        gradients = self._normalizer or self._chunks
        assert gradients is not None
        gradients.add(tile, first, last, weight, hidden, power)
        if self._low is not None and self._walk.low is not None:
            factors = self._walk.low.rows(first, last)
            self._low.add(tile, (first, last), (0, weight.size(0)), factors, power)

    def add_scaled(self, chunk: ScaledChunk, first: int, last: int, weight: Tensor) -> None:
        """Add the gradient of logits of rows [first, last), where there are those of hidden and
        weight alone."""
        assert self._chunks is not None
        self._chunks.add_scaled(chunk, first, last, weight, self._walk.own_hidden(first, last))

    def finish(self) -> list[Tensor]:
        """The gradients."""
        gradients = self._normalizer or self._chunks
        assert gradients is not None
        return [*gradients.finish(), *([] if self._low is None else self._low.finish())]


class ChunkGradients:
    """Those of hidden, weight and bias.

    `halves`: the weight's is of 16 bits, and the lower halves of its float32 sums lie beside it,
    where there are `several` chunks.
    """

    def __init__(self, inputs: HeadInputs, keep: Keep, halves: bool, several: bool) -> None:
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
                shape = weight.shape if several else (0,)
                self._lower = torch.empty(shape, dtype=torch.int16, device=weight.device)
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

    def add_scaled(
        self, chunk: ScaledChunk, first: int, last: int, weight: Tensor, hidden: Tensor
    ) -> None:
        """Add a chunk's gradient of logits in parts; there is none of the bias."""
        if self._hidden is not None:
            sums = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
            product_into(sums, chunk.tile, weight)
            factors = (weight, chunk.targets, chunk.scale, chunk.rest)
            scaled_rows_triton(sums, *factors, self._hidden[first:last])
        if self._weight is None:
            return
        scaled = torch.empty_like(hidden)
        torch.mul(hidden, chunk.scale.unsqueeze(1), out=scaled)
        if self._lower is not None:
            bounds = (first == 0, last == self._rows)
            more = TargetRows.of(chunk.targets, chunk.rest, hidden, weight.size(0))
            accumulate_halves_triton(chunk.tile, scaled, self._weight, self._lower, *bounds, more)
        else:
            write = add_product if first else product_into
            write(self._weight, chunk.tile.t(), scaled)
            self._weight.index_put_(
                (chunk.targets,), hidden * chunk.rest.unsqueeze(1), accumulate=True
            )

    def finish(self) -> list[Tensor]:
        """The gradients."""
        if self._power is not None:
            for sums in (self._weight, self._bias):
                if sums is not None:
                    sums.mul_(self._power)
        return [x for x in (self._hidden, self._weight, self._bias) if x is not None]
