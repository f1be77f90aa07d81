"""The divergence and its gradients in one pass: a few tokens with all their logits at a time.

Both heads' logits of a group of tokens stay in memory until the student's gradient is made from
them: one product for the logits of each head and one for each gradient, 8 N V H operations, where
statistics first and gradients from recomputed logits take 12, and 16 for a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.divergence_fold import (
    Divergence,
    HeadTile,
    PairStatistics,
    fold_pair_torch,
    fold_pair_triton,
)
from ..kernels.divergence_gradient import divergence_gradient_torch, divergence_gradient_triton
from ..kernels.divergence_mixture import PairNormalizers, mixture_tile_torch, mixture_tile_triton
from .divergence_passes import (
    RESULT_NAMES,
    HeadPair,
    kl_divergence,
    logit_bound,
    normalise,
    normalizers_of,
    pair_normalizers,
)
from .divergence_plan import OnePassPlan
from .gemm import add_product, product_into
from .tiles import HeadInputs, slice_or_none

Needs = tuple[bool, bool, bool]


def run_one_pass(
    pair: HeadPair,
    plan: OnePassPlan,
    weights: Tensor | None,
    active: int,
    needs: Needs,
    backend: str,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What RESULT_NAMES lists, [N] each, and the gradients of sum_i weights_i divergence_i.

    `weights` [N]; None is 1 each, and the first gradient is then d divergence_i / d hidden_i.
    Only the first `active` rows go into the gradients. Those come in the order hidden (in its own
    dtype, float32 for float16), weight, bias (both in the statistics' dtype), where needed.
    """
    student = pair.student
    rows, device = student.hidden.size(0), student.hidden.device
    results = {
        name: torch.empty(rows, dtype=pair.statistics_dtype, device=device) for name in RESULT_NAMES
    }
    gradients = _Gradients(student, needs)
    if rows:
        chunks = _Chunks(pair, plan, pair.use_triton(backend), any(needs))
        for first, last in _groups(rows, active, plan.rows):
            chunk = chunks.compute(first, last)
            for name, value in chunk.results.items():
                results[name][first:last] = value
            if last <= active and any(needs):
                chunks.differentiate(chunk, slice_or_none(weights, first, last), gradients)
    return results, gradients.finish()


def _groups(rows: int, active: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, last) of each group of tokens; none holds rows on both sides of `active`."""
    for start, end in ((0, active), (active, rows)):
        for first in range(start, end, most):
            yield first, min(first + most, end)


@dataclass(frozen=True)
class _Chunk:
    """A group of tokens whose logits are in the buffers."""

    first: int
    last: int
    results: dict[str, Tensor]

    @property
    def normalizers(self) -> PairNormalizers:
        return pair_normalizers(self.results)


class _Logits:
    """All logits of one head for a group of tokens, in one reused buffer with aligned rows."""

    def __init__(self, head: HeadInputs, plan: OnePassPlan) -> None:
        self._head = head
        self.weight = head.weight.to(head.compute_dtype)
        vocabulary = head.weight.size(0)
        self._buffer = torch.empty(
            plan.rows, -(-vocabulary // 8) * 8, dtype=head.tile_dtype, device=head.hidden.device
        )
        self.hidden = head.hidden[:0]
        self._temperature: Tensor | None = None

    def take(self, first: int, last: int) -> None:
        """Go to the rows [first, last)."""
        self.hidden = self._head.hidden[first:last].to(self._head.compute_dtype)
        self._temperature = slice_or_none(self._head.temperature, first, last)

    def multiply(self, start: int, end: int) -> None:
        """Compute the raw logits of the columns [start, end)."""
        tile = self._buffer[: self.hidden.size(0), start:end]
        product_into(tile, self.hidden, self.weight[start:end].t())

    def tile(self, start: int, end: int) -> HeadTile:
        """The raw logits of the columns [start, end)."""
        return HeadTile(
            self._buffer[: self.hidden.size(0), start:end],
            slice_or_none(self._head.bias, start, end),
            self._temperature,
            self._head.transform,
        )


class _Chunks:
    """The buffers of a pass, and what is done with a group of tokens in them."""

    def __init__(self, pair: HeadPair, plan: OnePassPlan, triton: bool, gradients: bool) -> None:
        self._pair = pair
        self._student = _Logits(pair.student, plan)
        self._teacher = _Logits(pair.teacher, plan)
        self._triton = triton
        vocabulary = pair.student.weight.size(0)
        self._blocks = [
            (start, min(start + plan.columns, vocabulary))
            for start in range(0, vocabulary, plan.columns)
        ]
        self._buffer: Tensor | None = None
        compute = pair.student.compute_dtype
        if gradients and compute != pair.student.tile_dtype:
            pitch = -(-plan.columns // 8) * 8
            device = pair.student.hidden.device
            self._buffer = torch.empty(plan.rows, pitch, dtype=compute, device=device)

    def compute(self, first: int, last: int) -> _Chunk:
        """Logits and values of the rows [first, last)."""
        pair = self._pair
        for logits in (self._student, self._teacher):
            logits.take(first, last)
        device = pair.student.hidden.device
        statistics = PairStatistics.empty(last - first, pair.statistics_dtype, device)
        fold = fold_pair_triton if self._triton else fold_pair_torch
        for start, end in self._blocks:
            self._student.multiply(start, end)
            self._teacher.multiply(start, end)
            fold(*self._tiles(start, end), statistics, pair.divergence)
        results = normalizers_of(statistics)
        if pair.divergence == Divergence.MIXTURE:
            results |= self._mixture(pair_normalizers(results))
        else:
            results |= kl_divergence(pair.divergence, statistics, results)
        return _Chunk(first, last, results)

    def _tiles(self, start: int, end: int) -> tuple[HeadTile, HeadTile]:
        """Both heads' logits for a reader, of which the torch twins destroy a copy."""
        tiles = self._student.tile(start, end), self._teacher.tile(start, end)
        if self._triton:
            return tiles
        student, teacher = (replace(tile, logits=tile.logits.clone()) for tile in tiles)
        return student, teacher

    def _mixture(self, normalizers: PairNormalizers) -> dict[str, Tensor]:
        beta = self._pair.beta
        from_teacher = torch.zeros_like(normalizers.student_centre)
        from_student = torch.zeros_like(from_teacher)
        add = mixture_tile_triton if self._triton else mixture_tile_torch
        for start, end in self._blocks:
            add(*self._tiles(start, end), normalizers, beta, from_teacher, from_student)
        divergence = beta * from_teacher + (1 - beta) * from_student
        return {"divergence": divergence.clamp_(min=0.0), "mean": from_student}

    def differentiate(self, chunk: _Chunk, weights: Tensor | None, gradients: _Gradients) -> None:
        """Turn the student's logits into their gradients and add the products. Destroys both."""
        pair, mean = self._pair, chunk.results["mean"]
        scale = torch.ones_like(mean) if weights is None else weights
        if pair.divergence == Divergence.MIXTURE:
            scale = scale * (1 - pair.beta)
        power = None
        if pair.student.compute_dtype == torch.float16:
            slope = pair.student.slope
            if isinstance(slope, Tensor):
                slope = slope[chunk.first : chunk.last]
            scale, power = normalise(scale, logit_bound(pair.divergence, mean) * slope)
        gradient_of = divergence_gradient_triton if self._triton else divergence_gradient_torch
        gradients.start(chunk.first, chunk.last, power)
        for start, end in self._blocks:
            tiles = self._student.tile(start, end), self._teacher.tile(start, end)
            out = tiles[0].logits
            if self._buffer is not None:
                out = self._buffer[: out.size(0), : end - start]
            gradient_of(*tiles, chunk.normalizers, scale, mean, pair.divergence, pair.beta, out)
            gradients.add(out, start, end, self._student.weight[start:end], self._student.hidden)
        gradients.finish_rows()


class _Gradients:
    """The student's gradients while groups of tokens are added to them."""

    def __init__(self, student: HeadInputs, needs: Needs) -> None:
        hidden, weight = student.hidden, student.weight
        self._dtype = student.statistics_dtype
        kept = self._dtype if hidden.dtype == torch.float16 else hidden.dtype
        self._hidden: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if needs[0]:
            self._hidden = torch.zeros(hidden.shape, dtype=kept, device=hidden.device)
        if needs[1]:
            self._weight = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
        if needs[2]:
            self._bias = torch.zeros(weight.size(0), dtype=self._dtype, device=weight.device)
        self._rows = (0, 0)
        self._sum: Tensor | None = None
        self._power: Tensor | None = None
        self._empty = True

    def start(self, first: int, last: int, power: Tensor | None) -> None:
        """Go to the rows [first, last), whose gradients of logits come divided by `power`."""
        self._rows = first, last
        if power is not None and self._power is not None:  # the sums move to the new unit
            self._multiply(self._power / power)
        self._power = power
        if self._hidden is not None:
            rows = self._hidden[first:last]
            self._sum = rows
            if rows.dtype != self._dtype:
                self._sum = torch.empty_like(rows, dtype=self._dtype)

    def add(self, tile: Tensor, start: int, end: int, block: Tensor, hidden: Tensor) -> None:
        """Add the products of a tile [n, v] with its weight block [v, H] and the rows [n, H]."""
        if self._sum is not None:
            write = product_into if start == 0 else add_product
            write(self._sum, tile, block)
        if self._weight is not None:
            write = product_into if self._empty else add_product
            write(self._weight[start:end], tile.t(), hidden)
        if self._bias is not None:
            self._bias[start:end] += tile.sum(0, dtype=self._dtype)

    def _multiply(self, factor: Tensor) -> None:
        for sums in (self._weight, self._bias):
            if sums is not None:
                sums.mul_(factor)

    def finish_rows(self) -> None:
        """Round the rows' gradient once."""
        self._empty = False
        if self._hidden is None or self._sum is None:
            return
        if self._power is not None:
            self._sum.mul_(self._power)
        rows = self._hidden[self._rows[0] : self._rows[1]]
        if rows.dtype != self._dtype:
            rows.copy_(self._sum)

    def finish(self) -> list[Tensor]:
        """The gradients that are needed."""
        if self._empty and self._weight is not None:
            self._weight.zero_()
        if self._power is not None:
            self._multiply(self._power)
        return [x for x in (self._hidden, self._weight, self._bias) if x is not None]
