"""Turn tiles of both heads' raw logits into the gradient of the divergence in the student's logits.

With p the teacher's, q the student's probability of token j, m = beta p + (1 - beta) q, and u the
upstream gradient of the row's divergence D,

    KL(p || q): u (q_j - p_j)
    KL(q || p): u q_j (log q_j - log p_j - D)
    mixture:    u (1 - beta) q_j (log q_j - log m_j - KL(q || m)).

The chain rule of the student's logit transform then gives the gradient of its raw logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .divergence_fold import (
    Divergence,
    HeadTile,
    head_block,
    head_row,
    head_variant,
)
from .divergence_launch import GRADIENT_LAUNCH, DivergenceLaunch
from .divergence_mixture import (
    NORMALIZER_TYPES,
    PairNormalizers,
    log_probabilities_torch,
    log_share_block,
    log_share_torch,
)
from .logit_transform import slope_block, transform_slope_torch
from .triton_shim import jit, tl


def divergence_gradient_torch(
    student: HeadTile,
    teacher: HeadTile,
    normalizers: PairNormalizers,
    scale: Tensor,
    mean: Tensor,
    divergence: Divergence,
    beta: float,
    out: Tensor,
) -> None:
    """Write the gradient of the student's raw [n, v] logits into `out`, maybe those logits.

    `scale` [n] is u (times 1 - beta for a mixture); `mean` [n] is KL(q || p) or KL(q || m).
    Destroys the tiles.
    """
    dtype = scale.dtype
    z = student.transformed(dtype)
    slope = transform_slope_torch(z, student.temperature, student.transform)
    log_q, log_p = log_probabilities_torch(z, teacher.transformed(dtype), normalizers)
    if divergence == Divergence.FORWARD_KL:
        q = log_q.exp_()
        gradient = q - log_p.exp_()
    else:
        gap = log_p.sub_(log_q)
        q = log_q.exp_()
        if divergence == Divergence.MIXTURE:
            gap = log_share_torch(gap, beta).add_(gap.clamp(min=0.0))
        gradient = gap.add_(mean.unsqueeze(1)).mul_(q).neg_().masked_fill_(q == 0, 0.0)
    gradient.mul_(scale.unsqueeze(1))
    if slope is not None:
        gradient.mul_(slope)
    if student.bias is not None:
        gradient.masked_fill_(student.bias == -float("inf"), 0.0)
    out.copy_(gradient)


@jit
def divergence_gradient_kernel(
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
    scale_ptr,
    mean_ptr,
    out_ptr,
    out_stride,
    width,
    beta,
    STUDENT_HAS_BIAS: tl.constexpr,
    STUDENT_HAS_SOFTCAP: tl.constexpr,
    STUDENT_ROW_TEMPERATURE: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROW_TEMPERATURE: tl.constexpr,
    DIVERGENCE: tl.constexpr,
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
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
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
    x, s = head_block(
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
    log_q = (s - tl.load(student_centre_ptr + row)) - tl.load(student_log_sum_ptr + row)
    log_p = (t - tl.load(teacher_centre_ptr + row)) - tl.load(teacher_log_sum_ptr + row)
    q = tl.exp(log_q)
    if DIVERGENCE == 0:
        gradient = q - tl.exp(log_p)
    else:
        gap = log_p - log_q
        if DIVERGENCE == 2:
            gap = log_share_block(gap, beta) + tl.maximum(gap, 0.0)
        gradient = tl.where(q == 0, 0.0, -q * (gap + tl.load(mean_ptr + row)))
    gradient *= tl.load(scale_ptr + row)
    gradient *= slope_block(x, student_scale, student_softcap, s_temperature, STUDENT_HAS_SOFTCAP)
    if STUDENT_HAS_BIAS:
        gradient = tl.where(s == float("-inf"), 0.0, gradient)
    out = out_ptr + row * out_stride + columns
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)


def divergence_gradient_triton(
    student: HeadTile,
    teacher: HeadTile,
    normalizers: PairNormalizers,
    scale: Tensor,
    mean: Tensor,
    divergence: Divergence,
    beta: float,
    out: Tensor,
    launch: DivergenceLaunch = GRADIENT_LAUNCH,
) -> None:
    """`divergence_gradient_torch` as one kernel launch; what belongs to rows must be float32."""
    grid = (student.logits.size(0), -(-student.logits.size(1) // launch.block))
    divergence_gradient_kernel[grid](
        **student.arguments("student"),
        **teacher.arguments("teacher"),
        **{f"{name}_ptr": field for name, field in vars(normalizers).items()},
        scale_ptr=scale,
        mean_ptr=mean,
        out_ptr=out,
        out_stride=out.stride(0),
        width=student.logits.size(1),
        beta=beta,
        DIVERGENCE=int(divergence),
        BLOCK=launch.block,
        num_warps=launch.warps,
    )


def _variant(
    divergence: Divergence, out: str, bias: str | None = None, transformed: bool = False
) -> tuple[str, dict[str, str], Any, int]:
    student = head_variant("student", "fp32", bias, transformed)
    teacher = head_variant("teacher", "fp32", bias, transformed)
    types = student[0] | teacher[0] | NORMALIZER_TYPES
    types |= {"scale_ptr": "*fp32", "mean_ptr": "*fp32"}
    types |= {"out_ptr": f"*{out}", "out_stride": "i32", "width": "i32", "beta": "fp32"}
    constants = (
        student[1] | teacher[1] | {"DIVERGENCE": int(divergence), "BLOCK": GRADIENT_LAUNCH.block}
    )
    return ("divergence_gradient_kernel", types, constants, GRADIENT_LAUNCH.warps)


# half-precision products: float32 tiles of logits, half-precision tiles of gradients
AOT_VARIANTS = [
    variant
    for divergence in Divergence
    for variant in (
        _variant(divergence, "bf16"),
        _variant(divergence, "bf16", "bf16", transformed=True),
        _variant(divergence, "fp32", "fp32", transformed=True),
        _variant(divergence, "fp16", "fp32", transformed=True),
    )
]
