"""Whether a caller's expectation would be used, asked before it is made."""

from __future__ import annotations

from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .chunks import choose_keep
from .gemm import product_dtype
from .tiles import HeadInputs


def single_pass_serves(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> bool:
    """Whether `fused_lm_head` would look at `expected_grads` in a call with these arguments.

    It looks at shapes, dtypes and device, at which tensors need gradients and at the count of
    misses, never at values: an expectation that is not used need not be made.
    """
    flat = hidden.reshape(-1, hidden.size(-1))
    dtype = product_dtype(hidden, weight)
    inputs = HeadInputs(flat, weight, bias, None, TileTransform(), dtype)
    return choose_keep(inputs, ("log_probs",), True, scratch_bytes, backend).phase == "expected"
