"""Whether a single pass serves a head, what its chunks cost, and in which dtypes it keeps what."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.lm_head_exponentials import exponential_bytes
from ..kernels.lm_head_fold_product import SPAN_COLUMNS, largest_partial_bytes
from .chunk_walk import join_bytes
from .expectation import FROZEN, expectation_counter
from .gemm import add_product, expects_wide_output
from .planner import TileCost, TilePlan, chunk_fits, default_scratch_bytes, plan_chunk
from .tiles import (
    HALF_DTYPES,
    HeadInputs,
    epilogues_serve,
    half_products_serve,
    use_products,
    use_triton,
)


class Keep(NamedTuple):
    """Which gradients the forward makes and keeps until the backward, and in which phase.

    `weight`: the dtype of the weight's, None for none. The phase is "expected", "frozen", or ""
    where nothing is kept. `normalizer`: in the phase "frozen", that of log_normalizer in hidden
    too. `low_hidden`, `low_weight`: those of the factors of a low-rank addition, in the statistics'
    dtype. In the phase "logits", the first `logits` rows of them for a backward that recomputes
    the others.
    """

    phase: str = ""
    hidden: bool = False
    weight: torch.dtype | None = None
    bias: bool = False
    normalizer: bool = False
    low_hidden: bool = False
    low_weight: bool = False
    logits: int = 0

    @property
    def flags(self) -> tuple[bool, ...]:
        """For hidden, weight, bias and both factors of a low-rank addition, whether its gradient is
        kept."""
        return self.hidden, self.weight is not None, self.bias, self.low_hidden, self.low_weight

    @property
    def accumulates(self) -> bool:
        """Whether each chunk is added to a gradient with a row for each token of the vocabulary."""
        return self.weight is not None or self.low_weight

    def row_places(self) -> list[int]:
        """Which of the kept gradients have a row for each token."""
        places = list(range(self.hidden + self.normalizer))
        if self.low_hidden:
            places.append(len(places) + (self.weight is not None) + self.bias)
        return places

    def hidden_dtype(self, hidden: torch.dtype, compute: torch.dtype) -> torch.dtype:
        """The dtype of hidden's gradient.

        Its own where a product can be written so at once; float16 products are divided by a power
        of two first.
        """
        if hidden == compute and compute != torch.float16:
            return hidden
        return torch.promote_types(compute, torch.float32)

    def plan(self, inputs: HeadInputs, triton: bool, scratch_bytes: int | None) -> TilePlan:
        """The chunks."""
        cost = self._cost(inputs, triton, scratch_bytes)
        size = inputs.hidden.size(0), inputs.weight.size(0)
        device = inputs.hidden.device.type
        return plan_chunk(self.phase, self.accumulates, *size, cost, device, scratch_bytes)

    def fits(self, inputs: HeadInputs, triton: bool, scratch_bytes: int | None) -> bool:
        """Whether chunks of rows with all of the vocabulary find room."""
        cost = self._cost(inputs, triton, scratch_bytes)
        columns, device = inputs.weight.size(0), inputs.hidden.device.type
        return chunk_fits(self.phase, self.accumulates, columns, cost, device, scratch_bytes)

    def for_rows(self, inputs: HeadInputs, backend: str, scratch_bytes: int | None) -> Keep:
        """The same where the rows of `inputs` are all that count.

        A single chunk needs no wide accumulator; logits are kept of no more rows than there are.
        """
        if self.phase == "logits":
            return self._replace(logits=min(self.logits, inputs.hidden.size(0)))
        own = inputs.weight.dtype
        if self.weight in (None, own) or own != inputs.compute_dtype or own == torch.float16:
            return self
        narrow = self._replace(weight=own)
        plan = narrow.plan(inputs, use_triton(backend, inputs), scratch_bytes)
        return narrow if plan.rows >= inputs.hidden.size(0) else self

    def _cost(self, inputs: HeadInputs, triton: bool, scratch_bytes: int | None) -> TileCost:
        """Scratch bytes per logit, column and row of a chunk.

        An accumulator that is wider than the weight counts where the caller states the bytes.
        """
        compute, statistics = inputs.compute_dtype.itemsize, inputs.statistics_dtype.itemsize
        width = inputs.weight.size(1)
        per_logit = inputs.tile_dtype.itemsize
        if inputs.tile_dtype != inputs.compute_dtype:
            per_logit += compute
        if not triton:
            # temporaries of the torch twins: at most five of the statistics' dtype and two masks
            per_logit += 5 * statistics + 2
        per_column = compute * width if inputs.weight.dtype != inputs.compute_dtype else 0
        per_column += -(-join_bytes(inputs) // inputs.weight.size(0))
        per_row = 4 * statistics * width if self.normalizer else 0
        if triton and epilogues_serve(inputs):
            per_row += largest_partial_bytes() * -(-inputs.weight.size(0) // SPAN_COLUMNS)
            if keeps_exponentials(inputs):
                # a product, or for the weight's gradient scaled rows and the targets' rows twice
                per_row += exponential_bytes(inputs.weight.size(0), SPAN_COLUMNS)
                per_row += width * statistics
                per_row += (width * statistics + width * compute) * (self.weight is not None)
        if scratch_bytes is not None:
            per_column += self._accumulator_bytes(inputs, triton) // inputs.weight.size(0)
        half = inputs.compute_dtype in HALF_DTYPES
        if half and not expects_wide_output(inputs.hidden.device, inputs.compute_dtype):
            kept = self.hidden_dtype(inputs.hidden.dtype, inputs.compute_dtype)
            if self.hidden and (self.normalizer or kept != inputs.compute_dtype):
                per_column += statistics * width
            per_column += 0 if inputs.low is None else statistics * inputs.low.rank
            per_row += statistics * width
            per_logit += statistics if triton else 0
        return TileCost(per_logit, per_column, per_row)

    def _accumulator_bytes(self, inputs: HeadInputs, triton: bool) -> int:
        """What the sums over chunks of the weight's gradient take above its own dtype."""
        if self.weight is None:
            return 0
        if self.weight != inputs.weight.dtype:
            return self.weight.itemsize * inputs.weight.numel()
        halves = accumulates_in_halves(inputs, triton)
        return inputs.weight.numel() * inputs.weight.itemsize if halves else 0


def keeps_exponentials(inputs: HeadInputs) -> bool:
    """Whether Hopper's products keep exponentials for the gradient, where they serve.

    Their range is that of bfloat16; float16 keeps logits.
    """
    return inputs.tile_dtype == torch.bfloat16


def accumulates_in_halves(inputs: HeadInputs, triton: bool) -> bool:
    """Whether float32 sums over chunks can be kept in a bfloat16 gradient of the weight and as
    much beside it."""
    half = inputs.weight.dtype == inputs.compute_dtype == torch.bfloat16
    return triton and half and half_products_serve(inputs)


def choose_keep(
    inputs: HeadInputs,
    names: tuple[str, ...],
    expected: bool,
    scratch_bytes: int | None,
    backend: str,
) -> Keep:
    """What a call of the head keeps. `expected`: the caller expects upstream gradients."""
    low = inputs.low or (None, None)
    tensors = (inputs.hidden, inputs.weight, inputs.bias, *low)
    needs = [x is not None and x.requires_grad for x in tensors]
    if not torch.is_grad_enabled() or not any(needs):
        return Keep()
    hidden, weight, bias, low_hidden, low_weight = needs
    triton = use_triton(backend, inputs)
    sums = inputs.statistics_dtype
    if accumulates_in_halves(inputs, triton):
        sums = inputs.weight.dtype
    of_weight = sums if weight else None
    keep = Keep("expected", hidden, of_weight, bias, False, low_hidden, low_weight)
    if expected and _believed("fused_lm_head") and keep.fits(inputs, triton, scratch_bytes):
        return keep
    keep = Keep("frozen", hidden=True, normalizer="log_normalizer" in names)
    serves = (
        not (weight or bias) and inputs.low is None and "log_probs" in names and _believed(FROZEN)
    )
    if serves and keep.fits(inputs, triton, scratch_bytes):
        return keep
    rows = 0
    # Hopper's products make logits anew in less time than it takes to read them
    recompute = torch.compiler.is_compiling() or use_products(backend, inputs)
    if scratch_bytes is not None and not recompute:
        left = scratch_bytes - default_scratch_bytes(inputs.hidden.device.type)
        rows = left // (logits_pitch(inputs) * inputs.tile_dtype.itemsize)
    return Keep("logits", logits=rows) if rows > 0 else Keep()


def logits_pitch(inputs: HeadInputs) -> int:
    """The columns of kept logits: those of the vocabulary, up to aligned rows."""
    return -(-inputs.weight.size(0) // 8) * 8


def _believed(function: str) -> bool:
    """Whether expectations are worth their while; a compiled graph must not depend on counts."""
    return torch.compiler.is_compiling() or expectation_counter(function).worth_trying


# Rows of the weight that are averaged at a time.
_MEAN_ROWS = 8192


def mean_weight(inputs: HeadInputs) -> Tensor:
    """The sum [1, H] of the weight's rows that `bias` does not mask, over V, in the statistics'
    dtype."""
    weight, dtype = inputs.weight, inputs.statistics_dtype
    total = torch.zeros(1, weight.size(1), dtype=dtype, device=weight.device)
    for start in range(0, weight.size(0), _MEAN_ROWS):
        block = weight[start : start + _MEAN_ROWS].to(inputs.compute_dtype)
        counted = torch.ones(1, block.size(0), dtype=block.dtype, device=block.device)
        if inputs.bias is not None:
            masked = inputs.bias[start : start + _MEAN_ROWS] == -float("inf")
            counted.masked_fill_(masked, 0.0)
        add_product(total, counted, block)
    return total / weight.size(0)
