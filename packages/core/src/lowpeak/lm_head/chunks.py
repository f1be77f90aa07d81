"""Whether a single pass serves a head, what its chunks cost, and in which dtypes it keeps what."""

from __future__ import annotations

import torch
from torch import Tensor

from .expectation import expectation_counter
from .gemm import add_product, expects_wide_output
from .planner import TileCost, chunk_fits
from .tiles import HALF_DTYPES, HeadInputs, use_triton

Needs = tuple[bool, bool, bool]


def kept_dtypes(
    hidden: torch.dtype, compute: torch.dtype
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """In which dtypes the gradients of hidden, weight and bias are kept.

    That of hidden in its own where a product can be written so at once; float16 products are
    divided by a power of two first.
    """
    statistics = torch.promote_types(compute, torch.float32)
    direct = hidden == compute and compute != torch.float16
    return hidden if direct else statistics, statistics, statistics


def chunk_cost(inputs: HeadInputs, needs: Needs, triton: bool, accumulate: bool) -> TileCost:
    """Scratch bytes per logit, column and row of a chunk.

    `accumulate`: count what a float32 gradient of the weight takes above its own dtype.
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
    if accumulate and needs[1] and inputs.weight.dtype != inputs.statistics_dtype:
        per_column += statistics * width
    per_row = 0
    half = inputs.compute_dtype in HALF_DTYPES
    if half and not expects_wide_output(inputs.hidden.device, inputs.compute_dtype):
        if (
            needs[0]
            and kept_dtypes(inputs.hidden.dtype, inputs.compute_dtype)[0] != inputs.compute_dtype
        ):
            per_column += statistics * width
        per_row += statistics * width
        per_logit += statistics if triton else 0
    return TileCost(per_logit, per_column, per_row)


def kept_gradients(
    inputs: HeadInputs,
    names: tuple[str, ...],
    expected: bool,
    scratch_bytes: int | None,
    backend: str,
) -> tuple[Needs, str]:
    """Which gradients the forward makes and keeps, and in which phase: "expected", "frozen" or "".

    `expected`: whether the caller expects upstream gradients.
    """
    tensors = (inputs.hidden, inputs.weight, inputs.bias)
    hidden, weight, bias = (x is not None and x.requires_grad for x in tensors)
    needs = (hidden, weight, bias)
    nothing = (False, False, False)
    if not torch.is_grad_enabled() or not any(needs):
        return nothing, ""
    triton = use_triton(backend, inputs)
    # a compiled graph must not depend on the counts
    believed = torch.compiler.is_compiling() or expectation_counter("fused_lm_head").worth_trying
    if expected and believed and _serves(inputs, needs, triton, "expected", scratch_bytes):
        return needs, "expected"
    frozen = needs == (True, False, False) and "log_probs" in names
    if frozen and _serves(inputs, needs, triton, "frozen", scratch_bytes):
        return needs, "frozen"
    return nothing, ""


def _serves(
    inputs: HeadInputs, needs: Needs, triton: bool, phase: str, scratch_bytes: int | None
) -> bool:
    """Whether chunks of rows with all of the vocabulary find room."""
    cost = chunk_cost(inputs, needs, triton, accumulate=scratch_bytes is not None)
    device = inputs.hidden.device.type
    return chunk_fits(phase, inputs.weight.size(0), cost, device, scratch_bytes)


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
