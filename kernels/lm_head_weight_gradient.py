"""A float32 [V, H] accumulator whose upper half is the 16-bit result it ends in.

A float32 number is two 16-bit halves. Chunk by chunk of tokens, the product tile^T hidden is added
to a weight gradient kept as such halves: the upper one lies in the storage of the bf16 or float16
result, the lower one in an int16 tensor beside it. Nothing is lost, and the accumulator costs 2 V H
bytes above the result instead of 4 V H. The last chunk rounds the sum once into the result.

The kernel is a persistent matrix product with the halves in its epilogue: added to by a kernel of
its own behind cuBLAS they cost 0.6 ms more of an H200 for each chunk of 2731 tokens of
[262144, 1152], where the product takes 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hopper_products import AOT_TARGETS, descriptor, grouped
from .hopper_products import programs as programs_for
from .triton_shim import jit, tl

__all__ = ["AOT_TARGETS", "AOT_VARIANTS", "accumulate_halves_torch", "accumulate_halves_triton"]

# 256 x 128 x 64 with 8 warps and 4 stages: of eight shapes the fastest on an H200, 711 TFLOP/s at
# 2731 tokens, where cuBLAS reaches 656 in bf16 and 607 adding to float32.
_BLOCK_V, _BLOCK_H, _BLOCK_N = 256, 128, 64
_GROUP, _WARPS, _STAGES = 8, 8, 4
# Columns of the vocabulary that the torch twin adds to at a time.
_TORCH_COLUMNS = 4096


def accumulate_halves_torch(
    tile: Tensor,
    hidden: Tensor,
    result: Tensor,
    lower: Tensor,
    first: bool,
    last: bool,
) -> None:
    """Add tile^T hidden to the float32 sum kept in `result` and `lower`.

    Args:
        tile: [n, V] gradients of the logits.
        hidden: [n, H], of the tile's dtype.
        result: [V, H] contiguous, bfloat16 or float16; before the last call it holds the upper 16
            bits of the sum, not a number.
        lower: [V, H] contiguous int16: the lower 16 bits.
        first: start from zero.
        last: round the sum into `result`; `lower` is then left as it was.
    """
    upper = result.view(torch.int16)
    for start in range(0, result.size(0), _TORCH_COLUMNS):
        rows = slice(start, start + _TORCH_COLUMNS)
        total = tile[:, rows].t().float() @ hidden.float()
        if not first:
            bits = (upper[rows].int() << 16) | (lower[rows].int() & 0xFFFF)
            total += bits.view(torch.float32)
        if last:
            result[rows] = total
        else:
            bits = total.view(torch.int32)
            upper[rows] = (bits >> 16).short()
            lower[rows] = (bits & 0xFFFF).short()


@jit
def lm_head_weight_gradient_kernel(
    tile,
    hidden,
    upper_ptr,
    lower_ptr,
    result_ptr,
    vocabulary,
    width,
    tokens,
    programs,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    blocks_v = tl.cdiv(vocabulary, BLOCK_V)
    blocks_h = tl.cdiv(width, BLOCK_H)
    for item in range(tl.program_id(0), blocks_v * blocks_h, programs):
        block_v, block_h = grouped(item, blocks_v, blocks_h, GROUP)
        start_v, start_h = block_v * BLOCK_V, block_h * BLOCK_H
        total = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for start_n in range(0, tokens, BLOCK_N):
            # what lies outside of the tensors is read as zero
            gradient = tile.load([start_n, start_v])
            total = tl.dot(gradient.T, hidden.load([start_n, start_h]), total)
        rows = start_v + tl.arange(0, BLOCK_V)
        columns = start_h + tl.arange(0, BLOCK_H)
        inside = (rows[:, None] < vocabulary) & (columns[None, :] < width)
        where = rows[:, None].to(tl.int64) * width + columns[None, :]
        if not FIRST:
            upper = tl.load(upper_ptr + where, mask=inside, other=0).to(tl.int32)
            lower = tl.load(lower_ptr + where, mask=inside, other=0).to(tl.int32)
            total += ((upper << 16) | (lower & 0xFFFF)).to(tl.float32, bitcast=True)
        if LAST:
            tl.store(result_ptr + where, total.to(result_ptr.dtype.element_ty), mask=inside)
        else:
            bits = total.to(tl.int32, bitcast=True)
            tl.store(upper_ptr + where, (bits >> 16).to(tl.int16), mask=inside)
            tl.store(lower_ptr + where, (bits & 0xFFFF).to(tl.int16), mask=inside)


def accumulate_halves_triton(
    tile: Tensor,
    hidden: Tensor,
    result: Tensor,
    lower: Tensor,
    first: bool,
    last: bool,
) -> None:
    """`accumulate_halves_torch` as one kernel; see `hopper_products` for what it takes."""
    vocabulary, width = result.shape
    blocks = -(-vocabulary // _BLOCK_V) * -(-width // _BLOCK_H)
    programs = programs_for(tile.device, blocks)
    lm_head_weight_gradient_kernel[(programs,)](
        descriptor(tile, (_BLOCK_N, _BLOCK_V)),
        descriptor(hidden, (_BLOCK_N, _BLOCK_H)),
        result.view(torch.int16),
        lower,
        result,
        vocabulary,
        width,
        tile.size(0),
        programs,
        FIRST=first,
        LAST=last,
        BLOCK_V=_BLOCK_V,
        BLOCK_H=_BLOCK_H,
        BLOCK_N=_BLOCK_N,
        GROUP=_GROUP,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


def _variant(dtype: str, **flags: bool) -> tuple[str, dict[str, str], Any, int]:
    flags = {name: flags.get(name, False) for name in ("FIRST", "LAST")}
    types = {
        "tile": f"tensordesc<{dtype}[{_BLOCK_N}, {_BLOCK_V}]>",
        "hidden": f"tensordesc<{dtype}[{_BLOCK_N}, {_BLOCK_H}]>",
        "upper_ptr": "*i16",
        "lower_ptr": "*i16",
        "result_ptr": f"*{dtype}",
    }
    types |= dict.fromkeys(("vocabulary", "width", "tokens", "programs"), "i32")
    constants: dict[str, object] = {"BLOCK_V": _BLOCK_V, "BLOCK_H": _BLOCK_H, "BLOCK_N": _BLOCK_N}
    constants |= {**flags, "GROUP": _GROUP}
    return ("lm_head_weight_gradient_kernel", types, constants, _WARPS)


AOT_VARIANTS = [
    _variant("bf16", FIRST=True),
    _variant("bf16"),
    _variant("bf16", LAST=True),
    _variant("fp16", LAST=True),
]
