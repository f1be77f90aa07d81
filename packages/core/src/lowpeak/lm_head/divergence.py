"""`fused_divergence`: checks, row selection and autograd around the inner operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import check_head, check_options
from .divergence_checks import (
    check_beta,
    check_expected_grads,
    check_mask,
    check_same_rows,
    shared_vocabulary,
)
from .divergence_ops import (
    COUNTER,
    divergence_backward,
    divergence_forward,
    divergence_scale_rows,
    head_inputs,
)
from .divergence_passes import RESULT_NAMES, ROW_NAMES, HeadPair
from .divergence_plan import one_pass_plan
from .divergence_rows import (
    assert_divergence_rows,
    given,
    select_divergence_rows,
)
from .gemm import product_dtype
from .rows import gathered, placed
from .tiles import HeadInputs
from .transform import LogitTransform

_IDENTITY = LogitTransform()


class DivergenceOutput(NamedTuple):
    """Per-token values with the shape of the mask, float32 (float64 for float64 inputs).

    0 where the mask is.
    """

    divergence: Tensor
    """The divergence between the student's and the teacher's next-token distribution, in nats."""
    student_entropy: Tensor
    """-sum_j q_j log q_j of the student's distribution, in nats. No gradient."""


def fused_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_transform: LogitTransform = _IDENTITY,
    teacher_transform: LogitTransform = _IDENTITY,
    expected_grads: Tensor | None = None,
    vocabulary: str = "same",
    row_selection: str = "valid",
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> DivergenceOutput:
    """Per-token divergence between a student's and a teacher's head without either's logits.

    With q the student's and p the teacher's softmax, and m = beta p + (1 - beta) q: `KL(p || q)`
    for beta 0, `KL(q || p)` for beta 1, and `beta KL(p || m) + (1 - beta) KL(q || m)` between, the
    generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv 2306.13649; TRL's
    DistillationTrainer). The gradient flows into the student only.

    The logits of both exist in tiles only, in float32. A gradient into `student_hidden` alone, as
    with a frozen head, is made in the forward, up to a factor per token, from a few tokens with all
    their logits at a time: 6 N V H operations. So are all gradients with `expected_grads`: 8 N V H.
    Otherwise, and where `scratch_bytes` holds too few tokens for that, the forward makes the values
    (4 N V H, of a mixture in small scratch 8) and the backward recomputes all logits (8 N V H).

    Args:
        student_hidden: [..., Hs], float64, float32, bfloat16 or float16, any strides.
        student_weight: [V, Hs]. Products are computed in the dtypes that `fused_lm_head` takes.
        teacher_hidden: [..., Ht], the same rows as `student_hidden`.
        teacher_weight: [V, Ht], the same vocabulary in the same order.
        beta: from 0 to 1.
        mask: [...] bool or integer; rows where it is 0 cost nothing and return 0. None: all count.
        student_bias: [V], added to the logits in float32; -inf masks a token.
        teacher_bias: [V], likewise.
        student_transform: scale, soft cap and temperature of the student's logits.
        teacher_transform: those of the teacher's. Distillation at a temperature gives it to both.
        expected_grads: [...], what d loss / d divergence of each row is going to be, up to one
            common factor: `mask.float()` for a sum or mean over the tokens. The backward uses the
            gradients made with it if what comes differs by at most 1e-6 of its largest, after one
            host synchronisation, else it recomputes them: a wrong expectation costs time, never
            correctness. After 3 misses in a row it is not looked at again, see
            `expectation_counts`. Rows where it is 0 take no part in the gradients' products. Not
            used where the student's weight and bias are frozen.
        vocabulary: "same" demands heads of one size. "shared" compares the first min(Vs, Vt) tokens
            of heads that were padded differently over one tokenizer, both renormalised over them.
        row_selection: as for `fused_lm_head`.
        scratch_bytes: as for `fused_lm_head`, for the tiles of both heads together, casts of whole
            weights and the float32 sum (4 V Hs bytes) of a half-precision weight's expected
            gradient. None is a default by device type, those casts and that sum on top: on
            accelerators 1280 MiB with expected gradients, 640 MiB for a frozen head or a mixture's
            values, 512 MiB otherwise.
        backend: "triton", "torch" or "auto".

    Returns:
        DivergenceOutput of tensors with the shape of the mask.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value; vocabularies of
            different sizes; every token masked; a KL divergence that is infinite because one head
            masks a token that the other allows.
        RuntimeError: when the gradients are differentiated once more.
    """
    check_head("student_", student_hidden, student_weight, student_bias, student_transform)
    check_head("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_transform)
    check_options(row_selection, scratch_bytes, backend)
    check_beta(beta)
    check_same_rows(student_hidden, teacher_hidden)
    check_mask(mask, student_hidden)
    check_expected_grads(expected_grads, student_hidden)
    size = shared_vocabulary(student_weight, teacher_weight, vocabulary)
    student = Head.of(student_hidden, student_weight, student_bias, student_transform, size)
    teacher = Head.of(teacher_hidden, teacher_weight, teacher_bias, teacher_transform, size)

    shape = student_hidden.shape[:-1]
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=student_hidden.device)
    mask = mask.reshape(-1)
    temperatures = given(
        student_temperature=student.temperature, teacher_temperature=teacher.temperature
    )
    biases = given(student_bias=student.bias, teacher_bias=teacher.bias)
    needs = tuple(
        torch.is_grad_enabled() and x is not None and x.requires_grad for x in student.leaves
    )
    expected = _usable(expected_grads, needs, mask)
    rows = valid = inner_mask = None
    active = mask.numel()
    if row_selection == "all":
        valid = assert_divergence_rows(mask, temperatures, biases, beta)
    elif torch.compiler.is_compiling():
        inner_mask = mask
    else:
        rows, active = select_divergence_rows(mask, temperatures, biases, beta, expected)
        student, teacher = student.selected(rows), teacher.selected(rows)
        expected = None if expected is None else gathered(expected, rows)
    plan, needs = _one_pass(student, teacher, float(beta), expected, needs, scratch_bytes, backend)

    divergence, entropy, *_ = _FusedDivergence.apply(  # type: ignore[no-untyped-call]  # torch's
        *student.tensors,
        *(None if x is None else x.detach() for x in teacher.tensors),
        student.transform,
        student.dtype,
        teacher.transform,
        teacher.dtype,
        inner_mask,
        float(beta),
        expected,
        active,
        plan,
        needs,
        scratch_bytes,
        backend,
    )
    return DivergenceOutput(
        placed(divergence, rows, valid, shape), placed(entropy, rows, valid, shape)
    )


def _usable(expected: Tensor | None, needs: Sequence[bool], mask: Tensor) -> Tensor | None:
    """The expected gradients [N], 0 where masked; None where they cannot help."""
    # under the compiler the count of misses would be a constant to compile for
    tried = torch.compiler.is_compiling() or COUNTER.worth_trying
    if expected is None or not (needs[1] or needs[2]) or not tried:
        return None
    dtype = torch.promote_types(expected.dtype, torch.float32)
    return torch.where(mask != 0, expected.detach().reshape(-1).to(dtype), 0.0)


def _one_pass(
    student: Head,
    teacher: Head,
    beta: float,
    expected: Tensor | None,
    needs: tuple[bool, ...],
    scratch_bytes: int | None,
    backend: str,
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(rows, columns) of the pass that holds whole rows of logits, and the gradients it makes.

    () is none. A mixture takes it for its values alone, too: 4 N V H operations instead of 8.
    """
    pair = HeadPair(student.inputs, teacher.inputs, beta)
    triton = pair.use_triton(backend)
    nothing = (False, False, False)
    wanted = nothing if expected is None and (needs[1] or needs[2]) else needs
    attempts = [wanted] if any(wanted) else []
    if 0.0 < beta < 1.0:
        attempts.append(nothing)
    for gradients in attempts:
        plan = one_pass_plan(pair, gradients, scratch_bytes, triton)
        if plan is not None:
            return (plan.rows, plan.columns), gradients
    return (), nothing


@dataclass(frozen=True)
class Head:
    """One head's arguments as the inner operators take them: rows flat, transform as numbers."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: Tensor | None
    transform: tuple[float, float, float]
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        vocabulary: int,
    ) -> Head:
        """The head over the first `vocabulary` tokens."""
        dtype = product_dtype(hidden, weight)
        if vocabulary < weight.size(0):
            weight = weight[:vocabulary]
            bias = None if bias is None else bias[:vocabulary]
        temperature = transform.temperature
        rows_temperature = None
        if isinstance(temperature, Tensor):
            wide = torch.promote_types(dtype, torch.float32)
            rows_temperature, temperature = temperature.reshape(-1).to(wide), 1.0
        constants = (float(transform.scale), float(transform.softcap or 0.0), float(temperature))
        flat = hidden.reshape(-1, hidden.size(-1))
        return cls(flat, weight, bias, rows_temperature, constants, dtype)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the operators take as a list."""
        return self.hidden, self.weight, self.bias, self.temperature

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What may need a gradient."""
        return self.hidden, self.weight, self.bias

    @property
    def inputs(self) -> HeadInputs:
        """What the passes take."""
        return head_inputs(self.tensors, self.transform, self.dtype)

    def selected(self, rows: Tensor | None) -> Head:
        """The head over some of the rows; None is all of them."""
        temperature = self.temperature
        return replace(
            self,
            hidden=gathered(self.hidden, rows),
            temperature=None if temperature is None else gathered(temperature, rows),
        )


class _FusedDivergence(torch.autograd.Function):
    """The inner operators with a derivative in the student's hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        student_temperature: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        teacher_temperature: Tensor | None,
        student_transform: tuple[float, float, float],
        student_dtype: torch.dtype,
        teacher_transform: tuple[float, float, float],
        teacher_dtype: torch.dtype,
        mask: Tensor | None,
        beta: float,
        expected: Tensor | None,
        active: int,
        one_pass: tuple[int, ...],
        needs: tuple[bool, ...],
        scratch_bytes: int | None,
        backend: str,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        student = (student_hidden, student_weight, student_bias, student_temperature)
        teacher = (teacher_hidden, teacher_weight, teacher_bias, teacher_temperature)
        ctx.student = (student_transform, student_dtype)
        ctx.teacher = (teacher_transform, teacher_dtype)
        ctx.beta = beta
        ctx.where = (scratch_bytes, backend)
        results = divergence_forward(
            *student,
            *ctx.student,
            teacher,
            *ctx.teacher,
            mask,
            beta,
            expected,
            active,
            one_pass,
            needs,
            scratch_bytes,
            backend,
        )
        constant, made = results[1 : len(RESULT_NAMES)], results[len(RESULT_NAMES) :]
        ctx.scales_rows = needs[0] and expected is None
        if ctx.scales_rows:
            ctx.hidden_dtype = student_hidden.dtype
            ctx.save_for_backward(*made)
        else:
            ctx.save_for_backward(*student, *teacher, mask, expected, *constant[1:], *made)
        ctx.mark_non_differentiable(*constant)
        return tuple(results[: len(RESULT_NAMES)])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        others = (None,) * 17
        if upstream[0] is None:
            return (None, None, None, *others)
        tensors = ctx.saved_tensors
        if ctx.scales_rows:
            hidden = divergence_scale_rows(tensors[0], upstream[0], ctx.hidden_dtype)
            return (hidden, None, None, *others)
        rows = 10 + len(ROW_NAMES)
        gradients = divergence_backward(
            *tensors[:4],
            *ctx.student,
            tensors[4:8],
            *ctx.teacher,
            tensors[8],
            ctx.beta,
            tensors[10:rows],
            tensors[9],
            tensors[rows:],
            upstream[0],
            *needs,
            *ctx.where,
        )
        remaining = iter(gradients)
        return (*(next(remaining) if need else None for need in needs), *others)
