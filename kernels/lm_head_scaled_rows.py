"""Rows of a product with exponentials, scaled, and what the row's target adds.

See `lm_head_exponentials`: hidden's gradient is scale * (E weight) + rest * weight[target].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .triton_shim import jit, tl

_BLOCK, _WARPS = 1024, 4


def scaled_rows_torch(
    product: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, rest: Tensor, out: Tensor
) -> None:
    """Write scale * product + rest * weight[targets] into `out`, rounded once.

    Args:
        product: [n, H], float32 as scale and rest [n].
        weight: [V, H].
        targets: [n] int64.
        out: [n, H].
    """
    own = weight.index_select(0, targets).to(product.dtype)
    out.copy_(product * scale.unsqueeze(1) + own * rest.unsqueeze(1))


@jit
def lm_head_scaled_rows_kernel(
    product_ptr,
    weight_ptr,
    weight_stride,
    targets_ptr,
    scale_ptr,
    rest_ptr,
    out_ptr,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    target = tl.load(targets_ptr + row)
    product = tl.load(product_ptr + row * width + column, mask=inside, other=0.0)
    own = tl.load(weight_ptr + target * weight_stride + column, mask=inside, other=0.0)
    scale, rest = tl.load(scale_ptr + row), tl.load(rest_ptr + row)
    result = product * scale + own.to(tl.float32) * rest
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def scaled_rows_triton(
    product: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, rest: Tensor, out: Tensor
) -> None:
    """`scaled_rows_torch` as one kernel launch; rows of product and out lie side by side."""
    rows, width = product.shape
    lm_head_scaled_rows_kernel[(rows, -(-width // _BLOCK))](
        product,
        weight,
        weight.stride(0),
        targets,
        scale,
        rest,
        out,
        width,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _variant(dtype: str, out: str) -> tuple[str, dict[str, str], Any, int]:
    types = {f"{name}_ptr": "*fp32" for name in ("product", "scale", "rest")}
    types |= {"weight_ptr": f"*{dtype}", "out_ptr": f"*{out}", "targets_ptr": "*i64"}
    types |= {"weight_stride": "i32", "width": "i32"}
    return ("lm_head_scaled_rows_kernel", types, {"BLOCK": _BLOCK}, _WARPS)


AOT_VARIANTS = [_variant("bf16", "bf16"), _variant("bf16", "fp32")]
