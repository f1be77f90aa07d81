"""Fold a tile of two heads' raw logits into running statistics of both softmaxes.

With s, t the logits of student and teacher and m_s, m_t their running maxima, a KL divergence needs
one sum beside the normalisers, of w_j ((t_j - m_t) - (s_j - m_s)): w_j is exp(t_j - m_t) for
KL(teacher || student) and exp(s_j - m_s) for KL(student || teacher). Everything is centred, so that
nothing cancels at large logit offsets, and a token of weight 0 contributes 0, never 0 * inf.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .divergence_launch import FOLD_LAUNCH, DivergenceLaunch
from .logit_transform import TileTransform, transform_block, transform_tile_torch
from .triton_shim import jit, tl

NEGATIVE_INFINITY = -float("inf")


class Divergence(IntEnum):
    """What is computed from the two distributions."""

    FORWARD_KL = 0  # KL(teacher || student)
    REVERSE_KL = 1  # KL(student || teacher)
    MIXTURE = 2  # beta KL(teacher || m) + (1 - beta) KL(student || m)


@dataclass(frozen=True)
class HeadTile:
    """A tile of one head's raw logits, and what its transform needs beside them."""

    logits: Tensor  # [n, v], without bias
    bias: Tensor | None  # [v]
    temperature: Tensor | None  # [n], in place of the transform's own
    transform: TileTransform

    def transformed(self, dtype: torch.dtype) -> Tensor:
        """z in `dtype`. Destroys the tile."""
        return transform_tile_torch(self.logits, self.bias, self.temperature, self.transform, dtype)

    def arguments(self, head: str) -> dict[str, object]:
        """Arguments of the kernels, their names prefixed by "student" or "teacher"."""
        values = {
            "ptr": self.logits,
            "stride": self.logits.stride(0),
            "bias_ptr": self.bias,
            "temperature_ptr": self.temperature,
            "scale": self.transform.scale,
            "softcap": self.transform.softcap,
            "temperature": self.transform.temperature,
        }
        flags = {
            "HAS_BIAS": self.bias is not None,
            "HAS_SOFTCAP": self.transform.softcap != 0.0,
            "ROW_TEMPERATURE": self.temperature is not None,
        }
        return {f"{head}_{name}": value for name, value in values.items()} | {
            f"{head.upper()}_{name}": flag for name, flag in flags.items()
        }


@dataclass(frozen=True)
class PairStatistics:
    """Running statistics of N rows over the vocabulary seen so far: [N], float32 or float64."""

    student_maximum: Tensor  # m_s
    student_sum: Tensor  # sum_j exp(s_j - m_s)
    student_centred: Tensor  # sum_j exp(s_j - m_s) (s_j - m_s)
    teacher_maximum: Tensor  # m_t
    teacher_sum: Tensor  # sum_j exp(t_j - m_t)
    gap: Tensor  # sum_j w_j ((t_j - m_t) - (s_j - m_s)); not for a mixture

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> PairStatistics:
        """Statistics of an empty vocabulary."""

        def full(value: float) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            student_maximum=full(NEGATIVE_INFINITY),
            student_sum=full(0.0),
            student_centred=full(0.0),
            teacher_maximum=full(NEGATIVE_INFINITY),
            teacher_sum=full(0.0),
            gap=full(0.0),
        )

    def rows(self, start: int, end: int) -> PairStatistics:
        """Views of rows [start, end)."""
        return PairStatistics(**{name: field[start:end] for name, field in vars(self).items()})


def fold_pair_torch(
    student: HeadTile, teacher: HeadTile, statistics: PairStatistics, divergence: Divergence
) -> None:
    """Fold the same columns of both heads into `statistics`, in place. Destroys the tiles."""
    dtype = statistics.student_maximum.dtype
    s, t = student.transformed(dtype), teacher.transformed(dtype)
    s_shift, s_shrink = _recentre(s, statistics.student_maximum)
    t_shift, t_shrink = _recentre(t, statistics.teacher_maximum)
    s_weights, t_weights = s.exp(), t.exp()
    if divergence != Divergence.MIXTURE:
        forward = divergence == Divergence.FORWARD_KL
        weights, shrink = (t_weights, t_shrink) if forward else (s_weights, s_shrink)
        seen = statistics.teacher_sum if forward else statistics.student_sum
        added = t.sub_(s).mul_(weights).masked_fill_(weights == 0, 0.0).sum(1)
        statistics.gap.addcmul_(seen, t_shift - s_shift).mul_(shrink).add_(added)
    added = s.mul_(s_weights).masked_fill_(s_weights == 0, 0.0).sum(1)
    statistics.student_centred.addcmul_(statistics.student_sum, s_shift).mul_(s_shrink).add_(added)
    statistics.student_sum.mul_(s_shrink).add_(s_weights.sum(1))
    statistics.teacher_sum.mul_(t_shrink).add_(t_weights.sum(1))


def _recentre(z: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract the new running maximum from z; (old - new maximum, its exponential).

    Before the first finite logit the shift is 0, the exponential 0.
    """
    new = torch.maximum(maximum, z.amax(1))
    centre = torch.where(new == NEGATIVE_INFINITY, 0.0, new)
    shift = maximum - centre
    shrink = torch.exp(shift)
    z.sub_(centre.unsqueeze(1))
    maximum.copy_(new)
    return shift.masked_fill_(shift == NEGATIVE_INFINITY, 0.0), shrink


@jit
def head_block(
    tile_ptr,
    bias_ptr,
    columns,
    inside,
    scale,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """A block of a head's row in float32: (raw logits with their bias, z)."""
    x = tl.load(tile_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return x, transform_block(x, scale, softcap, temperature, HAS_BIAS, HAS_SOFTCAP)


@jit
def head_row(
    tile_ptr, row_stride, temperature_ptr, temperature, row, ROW_TEMPERATURE: tl.constexpr
):
    """Where a head's row begins, and its temperature."""
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    return tile_ptr + row * row_stride, temperature


@jit
def _shift(old, new):
    """(old - new maximum or 0, its exponential or 0): nothing was summed where old is -inf."""
    centre = tl.where(new == float("-inf"), 0.0, new)
    return tl.where(old == float("-inf"), 0.0, old - centre), tl.exp(old - centre)


@jit
def divergence_fold_kernel(
    student_ptr,
    student_stride,
    student_bias_ptr,
    student_temperature_ptr,
    student_scale,
    student_softcap,
    student_temperature,
    teacher_ptr,
    teacher_stride,
    teacher_bias_ptr,
    teacher_temperature_ptr,
    teacher_scale,
    teacher_softcap,
    teacher_temperature,
    student_maximum_ptr,
    student_sum_ptr,
    student_centred_ptr,
    teacher_maximum_ptr,
    teacher_sum_ptr,
    gap_ptr,
    width,
    STUDENT_HAS_BIAS: tl.constexpr,
    STUDENT_HAS_SOFTCAP: tl.constexpr,
    STUDENT_ROW_TEMPERATURE: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student_ptr, s_temperature = head_row(
        student_ptr,
        student_stride,
        student_temperature_ptr,
        student_temperature,
        row,
        STUDENT_ROW_TEMPERATURE,
    )
    teacher_ptr, t_temperature = head_row(
        teacher_ptr,
        teacher_stride,
        teacher_temperature_ptr,
        teacher_temperature,
        row,
        TEACHER_ROW_TEMPERATURE,
    )

    # As in the fold kernel of the LM head, a lane folds groups of neighbouring columns on its own.
    lanes = tl.arange(0, BLOCK // GROUP)
    within = lanes[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    s_maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    t_maximum = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    s_sum = tl.zeros([BLOCK // GROUP], tl.float32)
    t_sum = tl.zeros([BLOCK // GROUP], tl.float32)
    s_centred = tl.zeros([BLOCK // GROUP], tl.float32)
    gap = tl.zeros([BLOCK // GROUP], tl.float32)
    for offset in range(0, width, BLOCK):
        columns = offset + within
        inside = columns < width
        _, s = head_block(
            student_ptr,
            student_bias_ptr,
            columns,
            inside,
            student_scale,
            student_softcap,
            s_temperature,
            STUDENT_HAS_BIAS,
            STUDENT_HAS_SOFTCAP,
        )
        _, t = head_block(
            teacher_ptr,
            teacher_bias_ptr,
            columns,
            inside,
            teacher_scale,
            teacher_softcap,
            t_temperature,
            TEACHER_HAS_BIAS,
            TEACHER_HAS_SOFTCAP,
        )
        s = tl.where(inside, s, float("-inf"))
        t = tl.where(inside, t, float("-inf"))

        s_new = tl.maximum(s_maximum, tl.max(s, axis=1))
        t_new = tl.maximum(t_maximum, tl.max(t, axis=1))
        s_shift, s_shrink = _shift(s_maximum, s_new)
        t_shift, t_shrink = _shift(t_maximum, t_new)
        s -= tl.where(s_new == float("-inf"), 0.0, s_new)[:, None]
        t -= tl.where(t_new == float("-inf"), 0.0, t_new)[:, None]
        s_weights = tl.exp(s)
        t_weights = tl.exp(t)
        if DIVERGENCE == 0:
            added = tl.sum(tl.where(t_weights == 0, 0.0, t_weights * (t - s)), axis=1)
            gap = (gap + (t_shift - s_shift) * t_sum) * t_shrink + added
        elif DIVERGENCE == 1:
            added = tl.sum(tl.where(s_weights == 0, 0.0, s_weights * (t - s)), axis=1)
            gap = (gap + (t_shift - s_shift) * s_sum) * s_shrink + added
        # exp(s) is 0 below -104: the bound turns 0 * -inf into 0
        added = tl.sum(s_weights * tl.maximum(s, -200.0), axis=1)
        s_centred = (s_centred + s_shift * s_sum) * s_shrink + added
        s_sum = s_sum * s_shrink + tl.sum(s_weights, axis=1)
        t_sum = t_sum * t_shrink + tl.sum(t_weights, axis=1)
        s_maximum = s_new
        t_maximum = t_new

    # Merge the lanes, and what earlier tiles left.
    s_old = tl.load(student_maximum_ptr + row)
    t_old = tl.load(teacher_maximum_ptr + row)
    s_old_sum = tl.load(student_sum_ptr + row)
    t_old_sum = tl.load(teacher_sum_ptr + row)
    s_new = tl.maximum(s_old, tl.max(s_maximum))
    t_new = tl.maximum(t_old, tl.max(t_maximum))
    s_shift, s_shrink = _shift(s_maximum, s_new)
    t_shift, t_shrink = _shift(t_maximum, t_new)
    s_old_shift, s_old_shrink = _shift(s_old, s_new)
    t_old_shift, t_old_shrink = _shift(t_old, t_new)
    if DIVERGENCE == 0:
        old = (tl.load(gap_ptr + row) + (t_old_shift - s_old_shift) * t_old_sum) * t_old_shrink
        lanes_gap = (gap + (t_shift - s_shift) * t_sum) * t_shrink
        tl.store(gap_ptr + row, old + tl.sum(lanes_gap))
    elif DIVERGENCE == 1:
        old = (tl.load(gap_ptr + row) + (t_old_shift - s_old_shift) * s_old_sum) * s_old_shrink
        lanes_gap = (gap + (t_shift - s_shift) * s_sum) * s_shrink
        tl.store(gap_ptr + row, old + tl.sum(lanes_gap))
    old = (tl.load(student_centred_ptr + row) + s_old_shift * s_old_sum) * s_old_shrink
    lanes_centred = (s_centred + s_shift * s_sum) * s_shrink
    tl.store(student_centred_ptr + row, old + tl.sum(lanes_centred))
    tl.store(student_sum_ptr + row, s_old_sum * s_old_shrink + tl.sum(s_sum * s_shrink))
    tl.store(teacher_sum_ptr + row, t_old_sum * t_old_shrink + tl.sum(t_sum * t_shrink))
    tl.store(student_maximum_ptr + row, s_new)
    tl.store(teacher_maximum_ptr + row, t_new)


def fold_pair_triton(
    student: HeadTile,
    teacher: HeadTile,
    statistics: PairStatistics,
    divergence: Divergence,
    launch: DivergenceLaunch = FOLD_LAUNCH,
) -> None:
    """`fold_pair_torch` as one kernel launch; statistics must be float32. Keeps the tiles."""
    divergence_fold_kernel[(student.logits.size(0),)](
        **student.arguments("student"),
        **teacher.arguments("teacher"),
        **{f"{name}_ptr": field for name, field in vars(statistics).items()},
        width=student.logits.size(1),
        DIVERGENCE=int(divergence),
        GROUP=launch.group,
        BLOCK=launch.block,
        num_warps=launch.warps,
    )


def head_variant(
    head: str, tile: str, bias: str | None, transformed: bool
) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants of `HeadTile.arguments(head)`, for ahead-of-time compilation."""
    types = {f"{head}_ptr": f"*{tile}", f"{head}_stride": "i32"}
    types |= {f"{head}_{name}": "fp32" for name in ("scale", "softcap", "temperature")}
    constants: dict[str, object] = {
        f"{head.upper()}_HAS_BIAS": bias is not None,
        f"{head.upper()}_HAS_SOFTCAP": transformed,
        f"{head.upper()}_ROW_TEMPERATURE": transformed,
    }
    for name, kind in (("bias_ptr", bias), ("temperature_ptr", "fp32" if transformed else None)):
        if kind is None:
            constants[f"{head}_{name}"] = None
        else:
            types[f"{head}_{name}"] = f"*{kind}"
    return types, constants


def _variant(
    divergence: Divergence, tile: str, bias: str | None = None, transformed: bool = False
) -> tuple[str, dict[str, str], Any, int]:
    student = head_variant("student", tile, bias, transformed)
    teacher = head_variant("teacher", tile, bias, transformed)
    types = student[0] | teacher[0] | {"width": "i32"}
    types |= {f"{field.name}_ptr": "*fp32" for field in fields(PairStatistics)}
    constants = student[1] | teacher[1]
    constants |= {
        "DIVERGENCE": int(divergence),
        "GROUP": FOLD_LAUNCH.group,
        "BLOCK": FOLD_LAUNCH.block,
    }
    return ("divergence_fold_kernel", types, constants, FOLD_LAUNCH.warps)


# half-precision products are folded as float32 tiles
AOT_VARIANTS = [
    variant
    for divergence in Divergence
    for variant in (
        _variant(divergence, "fp32"),
        _variant(divergence, "fp32", "fp32", transformed=True),
        _variant(divergence, "fp32", "bf16", transformed=True),
    )
]
