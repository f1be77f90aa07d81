"""The inner operators of the divergence: fixed schemas, opaque to the compiler and to autograd.

The student's tensors come one by one, so that autograd sees them, the teacher's as a list: hidden
[N, H], weight [V, H], bias [V] or None, temperature [N] or None. A transform is the triple (scale,
softcap or 0, temperature). With a `mask` the operators select the rows themselves, which keeps all
shapes static for torch.compile; eager callers select beforehand and save fewer hidden rows for the
backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .divergence_passes import (
    ROW_NAMES,
    HeadPair,
    run_divergence_backward,
    run_divergence_forward,
)
from .divergence_rows import given, select_divergence_rows
from .refusals import double_backward_error
from .rows import gathered, scattered
from .tiles import HeadInputs

RESULT_NAMES = ("divergence", "student_entropy", *ROW_NAMES)


@torch.library.custom_op("lowpeak::divergence_forward", mutates_args=())
def divergence_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    student_transform: Sequence[float],
    student_dtype: torch.dtype,
    teacher: Sequence[Tensor | None],
    teacher_transform: Sequence[float],
    teacher_dtype: torch.dtype,
    mask: Tensor | None,
    beta: float,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """One [N] tensor for each of RESULT_NAMES."""
    pair = HeadPair(
        _head((hidden, weight, bias, temperature), student_transform, student_dtype),
        _head(teacher, teacher_transform, teacher_dtype),
        beta,
    )
    rows, pair = _selected(pair, mask)
    with torch.autocast(hidden.device.type, enabled=False):
        results = run_divergence_forward(pair, scratch_bytes, backend)
    # an operator's results must not share memory, and KL's mean is its divergence
    results["mean"] = results["mean"].clone()
    return [scattered(results[name], rows, hidden.size(0)) for name in RESULT_NAMES]


@divergence_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    student_transform: Sequence[float],
    student_dtype: torch.dtype,
    teacher: Sequence[Tensor | None],
    teacher_transform: Sequence[float],
    teacher_dtype: torch.dtype,
    mask: Tensor | None,
    beta: float,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    dtype = torch.promote_types(torch.promote_types(student_dtype, teacher_dtype), torch.float32)
    return [hidden.new_empty(hidden.size(0), dtype=dtype) for _ in RESULT_NAMES]


@torch.library.custom_op("lowpeak::divergence_backward", mutates_args=())
def divergence_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    student_transform: Sequence[float],
    student_dtype: torch.dtype,
    teacher: Sequence[Tensor | None],
    teacher_transform: Sequence[float],
    teacher_dtype: torch.dtype,
    mask: Tensor | None,
    beta: float,
    saved: Sequence[Tensor],
    upstream: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of the student's hidden, weight and bias, those that are needed, in this order.

    `saved` follows ROW_NAMES; it and `upstream` hold [N] tensors.
    """
    pair = HeadPair(
        _head((hidden, weight, bias, temperature), student_transform, student_dtype),
        _head(teacher, teacher_transform, teacher_dtype),
        beta,
    )
    rows, pair = _selected(pair, mask)
    results = {name: gathered(x, rows) for name, x in zip(ROW_NAMES, saved, strict=True)}
    with torch.autocast(hidden.device.type, enabled=False):
        grad_hidden, grad_weight, grad_bias = run_divergence_backward(
            pair,
            results,
            gathered(upstream, rows).to(pair.statistics_dtype).contiguous(),
            (needs_hidden, needs_weight, needs_bias),
            scratch_bytes,
            backend,
        )
    if grad_hidden is not None:
        grad_hidden = scattered(grad_hidden, rows, hidden.size(0))
    return [x for x in (grad_hidden, grad_weight, grad_bias) if x is not None]


@divergence_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    student_transform: Sequence[float],
    student_dtype: torch.dtype,
    teacher: Sequence[Tensor | None],
    teacher_transform: Sequence[float],
    teacher_dtype: torch.dtype,
    mask: Tensor | None,
    beta: float,
    saved: Sequence[Tensor],
    upstream: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    needed = ((hidden, needs_hidden), (weight, needs_weight), (bias, needs_bias))
    return [x.new_empty(x.shape) for x, need in needed if need and x is not None]


divergence_backward.register_autograd(double_backward_error("fused_divergence"))


def _head(
    tensors: Sequence[Tensor | None], transform: Sequence[float], dtype: torch.dtype
) -> HeadInputs:
    hidden, weight, bias, temperature = tensors
    assert hidden is not None
    assert weight is not None
    # A student near its teacher differs from it by less than the rounding of bfloat16 logits.
    return HeadInputs(
        hidden, weight, bias, temperature, TileTransform(*transform), dtype, wide_tiles=True
    )


def _selected(pair: HeadPair, mask: Tensor | None) -> tuple[Tensor | None, HeadPair]:
    """The rows that count (None: all), and the pair cut down to them."""
    student, teacher = pair.student, pair.teacher
    rows = None
    if mask is not None:
        rows = select_divergence_rows(
            mask,
            given(student_temperature=student.temperature, teacher_temperature=teacher.temperature),
            given(student_bias=student.bias, teacher_bias=teacher.bias),
            pair.beta,
        )
    return rows, HeadPair(student.selected(rows), teacher.selected(rows), pair.beta)
