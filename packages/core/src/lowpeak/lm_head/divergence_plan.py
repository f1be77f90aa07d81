"""How many tokens of a divergence are held with their whole vocabulary, in one pass over them.

Like the tiles of the other passes, a function of shapes, dtypes and device type only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .divergence_passes import HeadPair
from .planner import MiB
from .tiles import HALF_DTYPES, HeadInputs

# Scratch where the caller names none, without casts of the weights: on accelerators no more than
# TRL's two float32 tiles of 4096 x 32768 logits.
_DEFAULT_SCRATCH = {"cpu": 64 * MiB}
_DEFAULT_SCRATCH_ACCELERATOR = 1024 * MiB
# Each group of tokens streams both weights and reads and writes the float32 gradient of the
# student's: below these numbers of tokens that costs more than a recompute of the logits saves.
_FEWEST_ROWS = {"cpu": 16}
_FEWEST_ROWS_ACCELERATOR = 128
_FEWEST_ROWS_ACCELERATOR_WEIGHT = 256
# Products of fewer columns keep no matrix unit busy.
_NARROWEST = {"cpu": 512}
_NARROWEST_ACCELERATOR = 4096
# A block's logits of both heads should be read back from the cache that the products left them in.
_BLOCK_LOGITS = 1 << 22
_COLUMN_STEP = 128
_ROW_STEP = 16


@dataclass(frozen=True)
class OnePassPlan:
    """`rows` tokens with all their logits at a time, computed in blocks of `columns`."""

    rows: int
    columns: int


def one_pass_plan(
    pair: HeadPair,
    needs: tuple[bool, ...],
    scratch_bytes: int | None,
    triton: bool,
) -> OnePassPlan | None:
    """The plan within `scratch_bytes`, or None where it holds too few tokens to be worth it.

    `needs`: gradients of the student's hidden, weight and bias. A weight's or bias' gradient in
    float16 needs one power of two for all tokens, known only after all logits: None.
    """
    student, device = pair.student, pair.student.hidden.device.type
    total = student.hidden.size(0)
    trained = needs[1] or needs[2]
    if trained and student.compute_dtype == torch.float16:
        return None
    casts = sum(
        head.weight.numel() * head.compute_dtype.itemsize
        for head in (student, pair.teacher)
        if head.weight.dtype != head.compute_dtype
    )
    if scratch_bytes is None:
        left = _DEFAULT_SCRATCH.get(device, _DEFAULT_SCRATCH_ACCELERATOR)
    else:
        left = scratch_bytes - casts
    fewest = _FEWEST_ROWS_ACCELERATOR_WEIGHT if trained else _FEWEST_ROWS_ACCELERATOR
    fewest = min(_FEWEST_ROWS.get(device, fewest), total)
    vocabulary = student.weight.size(0)
    per_logit, per_row, per_column = _costs(pair, any(needs), triton)
    columns = min(vocabulary, _NARROWEST.get(device, _NARROWEST_ACCELERATOR))
    rows = _rows(left, columns, per_logit, per_row, per_column)
    if total == 0 or rows < fewest:
        return None
    rows = min(_even(total, rows), total)
    # float32 gradients overwrite the logits: then a block costs nothing
    wider = (left - rows * per_row) // max(rows * per_logit + per_column, 1)
    wider = max(columns, min(wider, _BLOCK_LOGITS // rows) // _COLUMN_STEP * _COLUMN_STEP)
    return OnePassPlan(rows, min(vocabulary, wider))


def _rows(left: int, columns: int, per_logit: int, per_row: int, per_column: int) -> int:
    return max(left - columns * per_column, 0) // (per_row + columns * per_logit)


def _even(total: int, most: int) -> int:
    """The size of nearly equal parts of `total`, each at most `most`, in steps of 16."""
    if most >= total or most < _ROW_STEP:
        return most
    most = most // _ROW_STEP * _ROW_STEP
    parts = -(-total // most)
    return min(-(-total // (parts * _ROW_STEP)) * _ROW_STEP, most)


def _costs(pair: HeadPair, gradients: bool, triton: bool) -> tuple[int, int, int]:
    """Bytes per logit of a block, per token and per column of a block."""
    student, teacher = pair.student, pair.teacher
    wide = pair.statistics_dtype.itemsize
    pitch = -(-student.weight.size(0) // 8) * 8
    widths = student.weight.size(1), teacher.weight.size(1)
    tiles = student.tile_dtype.itemsize + teacher.tile_dtype.itemsize
    # casts of both hidden rows and the accumulator of the student's gradient
    per_row = pitch * tiles + 2 * wide * sum(widths)
    per_logit = per_column = 0
    if gradients and student.compute_dtype != student.tile_dtype:
        per_logit += student.compute_dtype.itemsize
    if not triton:
        # the torch twins destroy what they read, so copies, and five temporaries and two masks
        per_logit += 7 * wide + 2
    if any(_float_products(head) for head in (student, teacher)):
        per_column += wide * max(widths)
    return per_logit, per_row, per_column


def _float_products(head: HeadInputs) -> bool:
    """Whether products may cast their factors; asked of the device type, to stay traceable."""
    native = head.hidden.device.type == "cuda" and torch.version.hip is None
    return head.compute_dtype in HALF_DTYPES and not native
