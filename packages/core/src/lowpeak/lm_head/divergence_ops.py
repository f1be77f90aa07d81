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
from .divergence_one_pass import run_one_pass
from .divergence_passes import (
    RESULT_NAMES,
    ROW_NAMES,
    HeadPair,
    run_divergence_backward,
    run_divergence_forward,
)
from .divergence_plan import OnePassPlan
from .divergence_rows import given, select_divergence_rows
from .expectation import expectation_counter, judge
from .refusals import double_backward_error
from .rows import gathered, scattered
from .tiles import HeadInputs

COUNTER = expectation_counter("fused_divergence")


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
    expected: Tensor | None,
    active: int,
    one_pass: Sequence[int],
    needs: Sequence[bool],
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """One [N] tensor for each of RESULT_NAMES, then the gradients that `needs` asks for.

    `one_pass` (rows, columns) is the plan of a pass that makes them: sum_i expected_i divergence_i
    in hidden, weight and bias, with 1 for each expectation where there is none. Only the first
    `active` rows have one that is not 0. Without a plan `needs` is False throughout.
    """
    pair = HeadPair(
        head_inputs((hidden, weight, bias, temperature), student_transform, student_dtype),
        head_inputs(teacher, teacher_transform, teacher_dtype),
        beta,
    )
    rows, pair, active = _selected(pair, mask, expected, active)
    gradients: list[Tensor] = []
    with torch.autocast(hidden.device.type, enabled=False):
        if one_pass:
            weights = None
            if expected is not None:  # the gradient kernels compute in their dtype
                weights = gathered(expected, rows).to(pair.statistics_dtype).contiguous()
            wanted = (needs[0], needs[1], needs[2])
            results, gradients = run_one_pass(
                pair, OnePassPlan(*one_pass), weights, active, wanted, backend
            )
        else:
            results = run_divergence_forward(pair, scratch_bytes, backend)
            # an operator's results must not share memory, and KL's mean is its divergence
            results["mean"] = results["mean"].clone()
    if needs[0]:
        gradients[0] = scattered(gradients[0], rows, hidden.size(0))
    return [*(scattered(results[name], rows, hidden.size(0)) for name in RESULT_NAMES), *gradients]


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
    expected: Tensor | None,
    active: int,
    one_pass: Sequence[int],
    needs: Sequence[bool],
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    dtype = torch.promote_types(torch.promote_types(student_dtype, teacher_dtype), torch.float32)
    kept = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    wide = torch.promote_types(student_dtype, torch.float32)
    shapes = ((hidden.shape, kept), (weight.shape, wide), (weight.shape[:1], wide))
    return [
        *(hidden.new_empty(hidden.size(0), dtype=dtype) for _ in RESULT_NAMES),
        *(
            hidden.new_empty(shape, dtype=x)
            for (shape, x), need in zip(shapes, needs, strict=True)
            if need
        ),
    ]


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
    expected: Tensor | None,
    made: Sequence[Tensor],
    upstream: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of the student's hidden, weight and bias, those that are needed, in this order.

    `saved` follows ROW_NAMES; it and `upstream` hold [N] tensors. `made` are the gradients for the
    `expected` [N] upstream gradients, which serve where those came, up to a factor.
    """
    needed = ((hidden, needs_hidden), (weight, needs_weight), (bias, needs_bias))
    if made:
        assert expected is not None
        counting = upstream if mask is None else torch.where(mask != 0, upstream, 0.0)
        verdict = judge({"divergence": expected}, {"divergence": counting})
        if verdict.counts:
            COUNTER.record(verdict.held)
        if verdict.held:
            dtypes = [x.dtype for x, need in needed if need and x is not None]
            return [_times(x, verdict.factor, dtype) for x, dtype in zip(made, dtypes, strict=True)]
    pair = HeadPair(
        head_inputs((hidden, weight, bias, temperature), student_transform, student_dtype),
        head_inputs(teacher, teacher_transform, teacher_dtype),
        beta,
    )
    rows, pair, _ = _selected(pair, mask, None, 0)
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
    expected: Tensor | None,
    made: Sequence[Tensor],
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


@torch.library.custom_op("lowpeak::divergence_scale_rows", mutates_args=())
def divergence_scale_rows(per_row: Tensor, upstream: Tensor, like: torch.dtype) -> Tensor:
    """The gradient of hidden [N, H], from d divergence_i / d hidden_i and `upstream` [N]."""
    return _times(per_row, upstream.unsqueeze(1), like)


@divergence_scale_rows.register_fake
def _(per_row: Tensor, upstream: Tensor, like: torch.dtype) -> Tensor:
    return torch.empty_like(per_row, dtype=like)


divergence_scale_rows.register_autograd(double_backward_error("fused_divergence"))


def _times(x: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x * factor, rounded once to `dtype`."""
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def head_inputs(
    tensors: Sequence[Tensor | None], transform: Sequence[float], dtype: torch.dtype
) -> HeadInputs:
    """One head as the passes take it."""
    hidden, weight, bias, temperature = tensors
    assert hidden is not None
    assert weight is not None
    # A student near its teacher differs from it by less than the rounding of bfloat16 logits.
    return HeadInputs(
        hidden, weight, bias, temperature, TileTransform(*transform), dtype, wide_tiles=True
    )


def _selected(
    pair: HeadPair, mask: Tensor | None, expected: Tensor | None, active: int
) -> tuple[Tensor | None, HeadPair, int]:
    """The rows that count (None: all), the pair cut down to them, and how many are active."""
    student, teacher = pair.student, pair.teacher
    rows = None
    if mask is not None:
        rows, active = select_divergence_rows(
            mask,
            given(student_temperature=student.temperature, teacher_temperature=teacher.temperature),
            given(student_bias=student.bias, teacher_bias=teacher.bias),
            pair.beta,
            expected,
        )
    return rows, HeadPair(student.selected(rows), teacher.selected(rows), pair.beta), active
