"""Coefficients of a row's gradient where only the target's log-probability has one.

One launch a chunk of rows in place of a dozen: between a whole vocabulary's fold and its gradient
nothing else needs to run. See `lm_head_gradient` for what the coefficients mean.
"""

from __future__ import annotations

from typing import Any

import torch

from .lm_head_fold import RowStatistics
from .lm_head_gradient import RowCoefficients
from .triton_shim import jit, tl

_BLOCK = 256
_WARPS = 4


def target_coefficients_torch(statistics: RowStatistics, coefficients: RowCoefficients) -> None:
    """Fill `centre`, `inverse_sum` and `target_rest` from `target` and the folded `statistics`.

    The probability of the other tokens is their own sum over the total: nothing cancels where that
    of the target nears 1.
    """
    centre = torch.maximum(statistics.maximum, statistics.target)
    others = statistics.sum_exp * torch.exp(statistics.maximum - centre)
    inverse_sum = (others + torch.exp(statistics.target - centre)).reciprocal()
    coefficients.centre.copy_(centre)
    coefficients.inverse_sum.copy_(inverse_sum)
    torch.mul(coefficients.target, others * inverse_sum, out=coefficients.target_rest)


@jit
def lm_head_target_kernel(
    maximum_ptr,
    sum_exp_ptr,
    target_logit_ptr,
    target_ptr,
    centre_ptr,
    inverse_sum_ptr,
    target_rest_ptr,
    rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    maximum = tl.load(maximum_ptr + row, mask=inside, other=0.0)
    logit = tl.load(target_logit_ptr + row, mask=inside, other=0.0)
    centre = tl.maximum(maximum, logit, propagate_nan=tl.PropagateNan.ALL)
    others = tl.load(sum_exp_ptr + row, mask=inside, other=0.0) * tl.exp(maximum - centre)
    inverse_sum = tl.div_rn(1.0, others + tl.exp(logit - centre))
    rest = tl.load(target_ptr + row, mask=inside, other=0.0) * (others * inverse_sum)
    tl.store(centre_ptr + row, centre, mask=inside)
    tl.store(inverse_sum_ptr + row, inverse_sum, mask=inside)
    tl.store(target_rest_ptr + row, rest, mask=inside)


def target_coefficients_triton(statistics: RowStatistics, coefficients: RowCoefficients) -> None:
    """`target_coefficients_torch` as one kernel launch; everything must be float32."""
    rows = coefficients.target.size(0)
    lm_head_target_kernel[(-(-rows // _BLOCK),)](
        statistics.maximum,
        statistics.sum_exp,
        statistics.target,
        coefficients.target,
        coefficients.centre,
        coefficients.inverse_sum,
        coefficients.target_rest,
        rows,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


_POINTERS = (
    "maximum",
    "sum_exp",
    "target_logit",
    "target",
    "centre",
    "inverse_sum",
    "target_rest",
)
AOT_VARIANTS: list[tuple[str, dict[str, str], dict[str, Any], int]] = [
    (
        "lm_head_target_kernel",
        {**{f"{name}_ptr": "*fp32" for name in _POINTERS}, "rows": "i32"},
        {"BLOCK": _BLOCK},
        _WARPS,
    )
]
