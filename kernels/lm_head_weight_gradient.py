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

from dataclasses import dataclass
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


@dataclass(frozen=True)
class TargetRows:
    """Rows of the weight's gradient for tokens that are the target of some rows.

    ranks [V] int32, the place of a token among `values` [n, H] float32, -1 for none.
    """

    ranks: Tensor
    values: Tensor

    @classmethod
    def of(cls, targets: Tensor, rest: Tensor, hidden: Tensor, vocabulary: int) -> TargetRows:
        """Sums of rest [n] * hidden [n, H] over the rows of each target, in a fixed order."""
        ordered = targets.sort().values
        new = torch.zeros_like(ordered, dtype=torch.int32)
        new[1:] = ordered[1:] != ordered[:-1]
        ranks = torch.full((vocabulary,), -1, dtype=torch.int32, device=targets.device)
        ranks[ordered] = new.cumsum(0, dtype=torch.int32)
        values = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        added = hidden * rest.unsqueeze(1)
        values.index_put_((ranks[targets].long(),), added, accumulate=True)
        return cls(ranks, values)


def accumulate_halves_torch(
    tile: Tensor,
    hidden: Tensor,
    result: Tensor,
    lower: Tensor,
    first: bool,
    last: bool,
    more: TargetRows | None = None,
) -> None:
    """Add tile^T hidden to the float32 sum kept in `result` and `lower`.

    Args:
        tile: [n, V] gradients of the logits.
        hidden: [n, H], of the tile's dtype.
        result: [V, H] contiguous, bfloat16 or float16; before the last call it holds the upper 16
            bits of the sum, not a number.
        lower: [V, H] contiguous int16: the lower 16 bits.
        first: start from zero.
        last: round the sum into `result`; `lower` is then left as it was, and not looked at where
            this is the first, too.
        more: added to the product.
    """
    upper = result.view(torch.int16)
    for start in range(0, result.size(0), _TORCH_COLUMNS):
        rows = slice(start, start + _TORCH_COLUMNS)
        total = tile[:, rows].t().float() @ hidden.float()
        if more is not None:
            ranks = more.ranks[rows].unsqueeze(1)
            total += torch.where(ranks >= 0, more.values[ranks.flatten().clamp(min=0)], 0.0)
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
    upper,
    lower,
    result,
    ranks_ptr,
    values_ptr,
    vocabulary,
    width,
    tokens,
    programs,
    MORE: tl.constexpr,
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
        ranks = tl.full((BLOCK_V,), -1, tl.int32)
        if MORE:
            ranks = tl.load(ranks_ptr + rows, mask=rows < vocabulary, other=-1)
        # In parts, so that the halves find registers beside the sums.
        left, right = total.reshape(BLOCK_V, 2, BLOCK_H // 2).permute(0, 2, 1).split()
        for part in tl.static_range(2):
            sums = left if part == 0 else right
            corner = [start_v, start_h + part * (BLOCK_H // 2)]
            if MORE and tl.max(ranks) >= 0:
                columns = corner[1] + tl.arange(0, BLOCK_H // 2)
                inside = (ranks >= 0)[:, None] & (columns < width)[None, :]
                place = ranks[:, None].to(tl.int64) * width + columns[None, :]
                sums += tl.load(values_ptr + place, mask=inside, other=0.0)
            if not FIRST:
                bits = (upper.load(corner).to(tl.int32) << 16) | (
                    lower.load(corner).to(tl.int32) & 0xFFFF
                )
                sums += bits.to(tl.float32, bitcast=True)
            if LAST:
                result.store(corner, sums.to(result.dtype))
            else:
                bits = sums.to(tl.int32, bitcast=True)
                upper.store(corner, (bits >> 16).to(tl.int16))
                lower.store(corner, (bits & 0xFFFF).to(tl.int16))


def accumulate_halves_triton(
    tile: Tensor,
    hidden: Tensor,
    result: Tensor,
    lower: Tensor,
    first: bool,
    last: bool,
    more: TargetRows | None = None,
) -> None:
    """`accumulate_halves_torch` as one kernel; see `hopper_products` for what it takes."""
    vocabulary, width = result.shape
    blocks = -(-vocabulary // _BLOCK_V) * -(-width // _BLOCK_H)
    programs = programs_for(tile.device, blocks)
    upper = result.view(torch.int16)
    halves = (upper, upper if first and last else lower, result)
    lm_head_weight_gradient_kernel[(programs,)](
        descriptor(tile, (_BLOCK_N, _BLOCK_V)),
        descriptor(hidden, (_BLOCK_N, _BLOCK_H)),
        *(descriptor(x, (_BLOCK_V, _BLOCK_H // 2)) for x in halves),
        None if more is None else more.ranks,
        None if more is None else more.values,
        vocabulary,
        width,
        tile.size(0),
        programs,
        MORE=more is not None,
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
    flags = {name: flags.get(name, False) for name in ("MORE", "FIRST", "LAST")}
    types = {
        "tile": f"tensordesc<{dtype}[{_BLOCK_N}, {_BLOCK_V}]>",
        "hidden": f"tensordesc<{dtype}[{_BLOCK_N}, {_BLOCK_H}]>",
        "upper": f"tensordesc<i16[{_BLOCK_V}, {_BLOCK_H // 2}]>",
        "lower": f"tensordesc<i16[{_BLOCK_V}, {_BLOCK_H // 2}]>",
        "result": f"tensordesc<{dtype}[{_BLOCK_V}, {_BLOCK_H // 2}]>",
    }
    types |= dict.fromkeys(("vocabulary", "width", "tokens", "programs"), "i32")
    constants: dict[str, object] = {"BLOCK_V": _BLOCK_V, "BLOCK_H": _BLOCK_H, "BLOCK_N": _BLOCK_N}
    constants |= {**flags, "GROUP": _GROUP}
    if flags["MORE"]:
        types |= {"ranks_ptr": "*i32", "values_ptr": "*fp32"}
    else:
        constants |= {"ranks_ptr": None, "values_ptr": None}
    return ("lm_head_weight_gradient_kernel", types, constants, _WARPS)


AOT_VARIANTS = [
    _variant("bf16", FIRST=True),
    _variant("bf16"),
    _variant("bf16", LAST=True),
    _variant("bf16", MORE=True),
    _variant("bf16", MORE=True, FIRST=True, LAST=True),
    _variant("fp16", LAST=True),
]
