"""Exponentials of a chunk's logits, kept by the fold so that its gradient needs no pass of its own.

A row's logits z are kept as E_j = exp(z_j - c), c the row's own unit: with S their sum the gradient
of g log p_t in z_j is -g E_j / S for every token but the target t. So a product with E needs
nothing but a scale of its rows, and no logit is read, turned and written between the two; that of
the target, g (1 - p_t), is one row of the weight or of its gradient. bfloat16 has the exponents of
float32 and rounds E to 8 bits, whatever the size of z; the sums are those of the rounded E.

c is a guess (`lm_head_exponential_rows`). A block of the vocabulary whose largest logit lies far
from it keeps a unit of its own, `excess` (base 2) above the row's, and `finish_exponentials` brings
such a row, hardly ever one, to one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .hopper_products import BLOCK_V, LOG2E
from .triton_shim import jit, tl

# How far, base 2, a block's largest logit may lie from c: sums and products of 2^87 stay finite,
# and 6 binary orders below 2^-120 are normal numbers.
HIGHEST, LOWEST = 87.0, -120.0


@dataclass(frozen=True)
class Exponentials:
    """Kept exponentials of n rows and v tokens, and what is known of them.

    tile [n, v] bfloat16; unit [n] c of each row; excess [blocks, n] of blocks of BLOCK_V tokens and
    sums [spans, n], those of the rounded exponentials of each span, the target left out. All but
    the tile are float32.
    """

    tile: Tensor
    unit: Tensor
    excess: Tensor
    sums: Tensor

    def part(self, start: int, end: int, span: int) -> Exponentials:
        """Those of the tokens [start, end); start is a multiple of `span`, a span's tokens."""
        blocks = slice(start // BLOCK_V, -(-end // BLOCK_V))
        spans = slice(start // span, -(-end // span))
        return Exponentials(
            self.tile[:, start:end], self.unit, self.excess[blocks], self.sums[spans]
        )


def keep_exponentials_torch(z: Tensor, targets: Tensor, span: int, kept: Exponentials) -> None:
    """What a fold keeps of transformed logits z [n, v], whose columns are all of the vocabulary."""
    z = z.scatter(1, targets.unsqueeze(1), -float("inf"))
    for block, first in enumerate(range(0, z.size(1), BLOCK_V)):
        part = z[:, first : first + BLOCK_V]
        top = z[:, first // span * span : first + BLOCK_V].amax(1)  # of the span until here
        above = torch.where(top == -float("inf"), 0.0, (top - kept.unit) * LOG2E)
        excess = torch.where((above > HIGHEST) | (above < LOWEST), above, 0.0)
        kept.excess[block] = excess
        unit = kept.unit + excess / LOG2E
        kept.tile[:, first : first + BLOCK_V] = torch.exp(part - unit.unsqueeze(1))
    spans = torch.split(kept.tile.float(), span, 1)
    kept.sums.copy_(torch.stack([part.sum(1) for part in spans]))


def exponential_bytes(vocabulary: int, span: int) -> int:
    """Bytes of a row's unit, excesses and sums."""
    return 4 * (1 - (-vocabulary // BLOCK_V) - (-vocabulary // span))


def finish_exponentials_torch(
    kept: Exponentials, targets: Tensor, target_logits: Tensor, own: bool
) -> Tensor:
    """Bring every row to one unit; the sums [n] of its exponentials, the target left out.

    Args:
        kept: of all of the vocabulary, 0 for the target; `unit` is updated, `excess` and `sums` are
            not.
        targets: [n] int64; target_logits: [n].
        own: put the target's exponential in.
    """
    highest = kept.excess.amax(0)
    others = kept.sums.sum(0)
    moved = (kept.excess != 0).any(0)
    for row in moved.nonzero().flatten().tolist():
        shift = torch.exp2(kept.excess[:, row] - highest[row]).repeat_interleave(BLOCK_V)
        kept.tile[row] = kept.tile[row].float() * shift[: kept.tile.size(1)]
        others[row] = kept.tile[row].float().sum()
    kept.unit.add_(torch.where(moved, highest, 0.0) / LOG2E)
    if own:
        entry = torch.exp(target_logits - kept.unit).to(kept.tile.dtype)
        kept.tile.scatter_(1, targets.unsqueeze(1), entry.unsqueeze(1))
    return others


@jit
def lm_head_exponentials_kernel(
    tile_ptr,
    row_stride,
    unit_ptr,
    excess_ptr,
    sums_ptr,
    targets_ptr,
    target_logits_ptr,
    others_ptr,
    rows,
    width,
    blocks,
    spans,
    OWN: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNK)
    highest = tl.full((CHUNK,), float("-inf"), tl.float32)
    lowest = tl.full((CHUNK,), 0.0, tl.float32)
    for first in range(0, blocks, CHUNK):
        inside = first + index < blocks
        place = (first + index).to(tl.int64) * rows + row
        excess = tl.load(excess_ptr + place, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, excess)
        lowest = tl.minimum(lowest, tl.where(inside, excess, 0.0))
    top = tl.max(highest)
    sums = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, spans, CHUNK):
        place = (first + index).to(tl.int64) * rows + row
        sums += tl.load(sums_ptr + place, mask=first + index < spans, other=0.0)
    others = tl.sum(sums)
    tile_ptr += row * row_stride
    unit = tl.load(unit_ptr + row)
    if (top != 0.0) | (tl.min(lowest) < 0.0):
        others = 0.0
        for block in range(0, blocks):
            column = block * BLOCK_V + tl.arange(0, BLOCK_V)
            shift = tl.exp2(tl.load(excess_ptr + block * rows + row) - top)
            kept = tl.load(tile_ptr + column, mask=column < width, other=0.0).to(tl.float32)
            kept = (kept * shift).to(tile_ptr.dtype.element_ty)
            tl.store(tile_ptr + column, kept, mask=column < width)
            others += tl.sum(kept.to(tl.float32))
        unit += top / LOG2E
        tl.store(unit_ptr + row, unit)
        tl.debug_barrier()  # before the target's entry is written over
    if OWN:
        entry = tl.exp(tl.load(target_logits_ptr + row) - unit)
        target = tl.load(targets_ptr + row)
        tl.store(tile_ptr + target, entry.to(tile_ptr.dtype.element_ty))
    tl.store(others_ptr + row, others)


_CHUNK, _WARPS = 256, 4


def finish_exponentials_triton(
    kept: Exponentials, targets: Tensor, target_logits: Tensor, own: bool
) -> Tensor:
    """`finish_exponentials_torch` as one kernel launch."""
    rows, width = kept.tile.shape
    others = torch.empty_like(kept.unit)
    lm_head_exponentials_kernel[(rows,)](
        kept.tile,
        kept.tile.stride(0),
        kept.unit,
        kept.excess,
        kept.sums,
        targets,
        target_logits,
        others,
        rows,
        width,
        kept.excess.size(0),
        kept.sums.size(0),
        OWN=own,
        BLOCK_V=BLOCK_V,
        CHUNK=_CHUNK,
        LOG2E=LOG2E,
        num_warps=_WARPS,
    )
    return others


def _variant(own: bool) -> tuple[str, dict[str, str], Any, int]:
    floats = ("unit", "excess", "sums", "target_logits", "others")
    types = {"tile_ptr": "*bf16", "targets_ptr": "*i64"}
    types |= {f"{name}_ptr": "*fp32" for name in floats}
    types |= dict.fromkeys(("row_stride", "rows", "width", "blocks", "spans"), "i32")
    constants = {"OWN": own, "BLOCK_V": BLOCK_V, "CHUNK": _CHUNK, "LOG2E": LOG2E}
    return ("lm_head_exponentials_kernel", types, constants, _WARPS)


AOT_VARIANTS = [_variant(True), _variant(False)]
