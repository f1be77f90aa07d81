"""Matrix products with a float32 result from half-precision factors, where the library has them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def has_wide_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `mm(out_dtype=float32)` works for these factors.

    Found by running it once: ROCm and XPU builds of one torch version differ in it.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    probe = torch.zeros(16, 16, device=device, dtype=dtype)
    out = torch.empty(16, 16, device=device, dtype=torch.float32)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32, out=out)
        torch.addmm(out, probe, probe, out_dtype=torch.float32, out=out)
    except RuntimeError:
        return False
    return True


def expects_wide_output(device: torch.device, dtype: torch.dtype) -> bool:
    """`has_wide_output`, or a safe guess while a compiler traces and nothing can be run."""
    if torch.compiler.is_compiling():
        return device.type == "cuda" and torch.version.hip is None and dtype != torch.float64
    return has_wide_output(device, dtype)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of hidden @ weight.T: autocast's, or the wider of both where there is none."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # torch's autocast leaves float64 alone
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a @ b, rounded once to the dtype of `out` (that of `a` and `b`, or float32)."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif has_wide_output(a.device, a.dtype):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    """accumulator += a @ b without rounding the product to the dtype of `a` first."""
    if accumulator.dtype == a.dtype:
        torch.addmm(accumulator, a, b, out=accumulator)
    elif has_wide_output(a.device, a.dtype):
        torch.addmm(accumulator, a, b, out_dtype=accumulator.dtype, out=accumulator)
    else:
        accumulator.addmm_(a.to(accumulator.dtype), b.to(accumulator.dtype))
