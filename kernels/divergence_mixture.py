"""Sum the divergences of two known softmaxes from their mixture over a tile, one row a program.

With p the teacher's, q the student's probability of a token, m = beta p + (1 - beta) q and
d = log p - log q, the larger of p and q serves as the unit:

    log(m / p) = log(1 - (1 - beta) (1 - exp(-d))),  log(m / q) = log(m / p) + d   where d > 0,
    log(m / q) = log(1 - beta (1 - exp(d))),         log(m / p) = log(m / q) - d   elsewhere.

Nothing overflows where the supports are disjoint, and equal distributions give exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .divergence_fold import HeadTile, head_block, head_row, head_variant
from .divergence_launch import MIXTURE_LAUNCH, DivergenceLaunch
from .triton_shim import jit, tl


@dataclass(frozen=True)
class PairNormalizers:
    """log p_j = (z_j - centre) - log_sum of both heads, each [N]."""

    student_centre: Tensor  # the row's largest logit
    student_log_sum: Tensor  # log sum_j exp(z_j - centre)
    teacher_centre: Tensor
    teacher_log_sum: Tensor

    def rows(self, start: int, end: int) -> PairNormalizers:
        """Views of rows [start, end)."""
        return PairNormalizers(**{name: field[start:end] for name, field in vars(self).items()})


def log_probabilities_torch(
    student: Tensor, teacher: Tensor, normalizers: PairNormalizers
) -> tuple[Tensor, Tensor]:
    """Transformed logits [n, v] of both heads turned into log q and log p, in place."""
    student.sub_(normalizers.student_centre.unsqueeze(1))
    teacher.sub_(normalizers.teacher_centre.unsqueeze(1))
    log_q = student.sub_(normalizers.student_log_sum.unsqueeze(1))
    return log_q, teacher.sub_(normalizers.teacher_log_sum.unsqueeze(1))


def log_share_torch(gap: Tensor, beta: float) -> Tensor:
    """log(m / max(p, q)) from `gap` = log p - log q; NaN where both probabilities are 0."""
    behind = torch.expm1(-gap.abs())
    return torch.where(gap > 0, (1 - beta) * behind, beta * behind).log1p_()


def mixture_tile_torch(
    student: HeadTile,
    teacher: HeadTile,
    normalizers: PairNormalizers,
    beta: float,
    from_teacher: Tensor,
    from_student: Tensor,
) -> None:
    """Add a tile's part of KL(p || m) and KL(q || m) to `from_teacher`, `from_student` [n].

    Destroys the tiles.
    """
    dtype = from_teacher.dtype
    log_q, log_p = log_probabilities_torch(
        student.transformed(dtype), teacher.transformed(dtype), normalizers
    )
    gap = log_p - log_q
    p, q = log_p.exp_(), log_q.exp_()
    share = log_share_torch(gap, beta)
    over_p = share - gap.clamp(max=0.0)
    over_q = share.add_(gap.clamp_(min=0.0))
    from_teacher.sub_(over_p.mul_(p).masked_fill_(p == 0, 0.0).sum(1))
    from_student.sub_(over_q.mul_(q).masked_fill_(q == 0, 0.0).sum(1))


@jit
def log_share_block(gap, beta):
    """`log_share_torch` of a block."""
    share = tl.where(gap > 0, 1.0 - beta, beta)
    return tl.log(1.0 - share * (1.0 - tl.exp(-tl.abs(gap))))


@jit
def divergence_mixture_kernel(
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
    student_centre_ptr,
    student_log_sum_ptr,
    teacher_centre_ptr,
    teacher_log_sum_ptr,
    from_teacher_ptr,
    from_student_ptr,
    width,
    beta,
    STUDENT_HAS_BIAS: tl.constexpr,
    STUDENT_HAS_SOFTCAP: tl.constexpr,
    STUDENT_ROW_TEMPERATURE: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROW_TEMPERATURE: tl.constexpr,
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
    s_centre = tl.load(student_centre_ptr + row)
    s_log_sum = tl.load(student_log_sum_ptr + row)
    t_centre = tl.load(teacher_centre_ptr + row)
    t_log_sum = tl.load(teacher_log_sum_ptr + row)
    from_teacher = tl.zeros([BLOCK], tl.float32)
    from_student = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, width, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
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
        log_q = (s - s_centre) - s_log_sum
        log_p = (t - t_centre) - t_log_sum
        q = tl.where(inside, tl.exp(log_q), 0.0)
        p = tl.where(inside, tl.exp(log_p), 0.0)
        gap = log_p - log_q
        share = log_share_block(gap, beta)
        from_teacher -= tl.where(p == 0, 0.0, p * (share - tl.minimum(gap, 0.0)))
        from_student -= tl.where(q == 0, 0.0, q * (share + tl.maximum(gap, 0.0)))
    teacher_part = tl.load(from_teacher_ptr + row) + tl.sum(from_teacher)
    student_part = tl.load(from_student_ptr + row) + tl.sum(from_student)
    tl.store(from_teacher_ptr + row, teacher_part)
    tl.store(from_student_ptr + row, student_part)


def mixture_tile_triton(
    student: HeadTile,
    teacher: HeadTile,
    normalizers: PairNormalizers,
    beta: float,
    from_teacher: Tensor,
    from_student: Tensor,
    launch: DivergenceLaunch = MIXTURE_LAUNCH,
) -> None:
    """`mixture_tile_torch` as one kernel launch; sums must be float32. Keeps the tiles."""
    divergence_mixture_kernel[(student.logits.size(0),)](
        **student.arguments("student"),
        **teacher.arguments("teacher"),
        **{f"{name}_ptr": field for name, field in vars(normalizers).items()},
        from_teacher_ptr=from_teacher,
        from_student_ptr=from_student,
        width=student.logits.size(1),
        beta=beta,
        BLOCK=launch.block,
        num_warps=launch.warps,
    )


NORMALIZER_TYPES = {f"{field.name}_ptr": "*fp32" for field in fields(PairNormalizers)}


def _variant(bias: str | None, transformed: bool) -> tuple[str, dict[str, str], Any, int]:
    student = head_variant("student", "fp32", bias, transformed)
    teacher = head_variant("teacher", "fp32", bias, transformed)
    types = student[0] | teacher[0] | NORMALIZER_TYPES
    types |= {"from_teacher_ptr": "*fp32", "from_student_ptr": "*fp32"}
    types |= {"width": "i32", "beta": "fp32"}
    constants = student[1] | teacher[1] | {"BLOCK": MIXTURE_LAUNCH.block}
    return ("divergence_mixture_kernel", types, constants, MIXTURE_LAUNCH.warps)


# half-precision products are float32 tiles
AOT_VARIANTS = [
    _variant(None, False),
    _variant("fp32", True),
    _variant("bf16", True),
]
