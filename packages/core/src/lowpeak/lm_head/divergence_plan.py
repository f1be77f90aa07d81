"""How many tokens of a divergence are held with their whole vocabulary, in one pass over them.

Like the tiles of the other passes, a function of shapes, dtypes and device type only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .divergence_passes import HeadPair
from .planner import MiB
from .tiles import HALF_DTYPES, HeadInputs

# Scratch where the caller names none, without casts of the weights: on accelerators what TRL 1.16
# holds in a backward, two float32 tiles of 4096 x 32768 logits and a bfloat16 one, or half of it
# where the student's weight is frozen and groups need not be as large.
_DEFAULT_SCRATCH = {"cpu": 64 * MiB}
_DEFAULT_SCRATCH_ACCELERATOR = 640 * MiB
_DEFAULT_SCRATCH_ACCELERATOR_WEIGHT = 1280 * MiB
# Each group of tokens streams both weights and reads and writes the float32 gradient of the
# student's. On an H200 (V = 262144, H = 1152) the latter cost fused_lm_head 23 ms of 49 in groups
# of 256 tokens and 8 of 35 in groups of 512, where recomputing 4 N V H would cost 14.
_FEWEST_ROWS = {"cpu": 16}
_FEWEST_ROWS_ACCELERATOR = 128
_FEWEST_ROWS_ACCELERATOR_WEIGHT = 384
# Products of fewer columns keep no matrix unit busy.
_NARROWEST = {"cpu": 512}
_NARROWEST_ACCELERATOR = 4096
# Large enough that launching a block's kernels from Python takes less time than running them.
_BLOCK_LOGITS = {"cpu": 1 << 22}
_BLOCK_LOGITS_ACCELERATOR = 1 << 25
_COLUMN_STEP = 128
_ROW_STEPS = (128, 16)

_forced: list[OnePassPlan] = []


@dataclass(frozen=True)
class OnePassPlan:
    """`rows` tokens with all their logits at a time, computed in blocks of `columns`."""

    rows: int
    columns: int


@contextmanager
def override_one_pass(rows: int, columns: int) -> Iterator[None]:
    """Use this plan instead of the planner's, in every thread, while the context is open.

    For measurements: `scratch_bytes` is not looked at.
    """
    _forced.append(OnePassPlan(rows, columns))
    try:
        yield
    finally:
        _forced.pop()


def one_pass_plan(
    pair: HeadPair,
    needs: tuple[bool, ...],
    scratch_bytes: int | None,
    triton: bool,
) -> OnePassPlan | None:
    """The plan within `scratch_bytes`, or None where it holds too few tokens to be worth it.

    `needs`: gradients of the student's hidden, weight and bias.
    """
    device, trained = pair.student.hidden.device.type, needs[1] or needs[2]
    total, vocabulary = pair.student.hidden.size(0), pair.student.weight.size(0)
    if _forced:
        plan = _forced[-1]
        return OnePassPlan(min(plan.rows, total), min(plan.columns, vocabulary)) if total else None
    default, fewest = _DEFAULT_SCRATCH_ACCELERATOR, _FEWEST_ROWS_ACCELERATOR
    if trained:
        default, fewest = _DEFAULT_SCRATCH_ACCELERATOR_WEIGHT, _FEWEST_ROWS_ACCELERATOR_WEIGHT
    if scratch_bytes is None:
        left = _DEFAULT_SCRATCH.get(device, default)
    else:
        left = scratch_bytes - _whole_weights(pair, needs[1])
    fewest = min(_FEWEST_ROWS.get(device, fewest), total)
    per_logit, per_row, per_column = _costs(pair, any(needs), triton)
    columns = min(vocabulary, _NARROWEST.get(device, _NARROWEST_ACCELERATOR))
    rows = max(left - columns * per_column, 0) // (per_row + columns * per_logit)
    if total == 0 or rows < fewest:
        return None
    rows = _even(total, rows)
    # float32 gradients overwrite the logits: then a block costs nothing
    wider = (left - rows * per_row) // max(rows * per_logit + per_column, 1)
    most = _BLOCK_LOGITS.get(device, _BLOCK_LOGITS_ACCELERATOR) // rows
    wider = max(columns, min(wider, most) // _COLUMN_STEP * _COLUMN_STEP)
    return OnePassPlan(rows, min(vocabulary, wider))


def _whole_weights(pair: HeadPair, accumulate: bool) -> int:
    """Bytes of casts of both weights, and of a gradient wider than its weight."""
    size = sum(
        head.weight.numel() * head.compute_dtype.itemsize
        for head in (pair.student, pair.teacher)
        if head.weight.dtype != head.compute_dtype
    )
    weight, wide = pair.student.weight, pair.student.statistics_dtype
    return size + (weight.numel() * wide.itemsize if accumulate and weight.dtype != wide else 0)


def _even(total: int, most: int) -> int:
    """The size of nearly equal parts of `total`, each at most `most`, a multiple of a row step."""
    if most >= total:
        return total
    for step in _ROW_STEPS:
        if most >= step:
            most = most // step * step
            parts = -(-total // most)
            return min(-(-total // (parts * step)) * step, most)
    return most


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
