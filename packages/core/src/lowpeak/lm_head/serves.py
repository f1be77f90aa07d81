"""Whether a caller's expectation would be used, asked before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .chunks import choose_keep
from .gemm import product_dtype
from .low_rank import LowRank, check_low_rank, low_rank_factors
from .tiles import HeadInputs


def single_pass_serves(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    low_rank: LowRank | Sequence[LowRank] | None = None,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> bool:
    """Whether `fused_lm_head` would look at `expected_grads` in a call with these arguments.

    It looks at shapes, dtypes and device, at which tensors need gradients and at the count of
    misses, never at values: an expectation that is not used need not be made.
    """
    flat = hidden.reshape(-1, hidden.size(-1))
    dtype = product_dtype(hidden, weight)
    additions = [replace(x, b=x.b[:0]) for x in check_low_rank(low_rank, hidden, weight)]
    low = low_rank_factors(flat[:0], additions)
    inputs = HeadInputs(flat, weight, bias, None, TileTransform(), dtype, low=low)
    return choose_keep(inputs, ("log_probs",), True, scratch_bytes, backend).phase == "expected"
