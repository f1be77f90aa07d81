"""The divergence of two heads from all their logits, and the comparison of a call with it.

Written from the contract of `fused_divergence`: the truth in float64, the yardstick in float32.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lm_head_checks import Case, error, largest, make_case, public_transform
from lm_head_oracle import IDENTITY, Transform, transformed_logits
from lm_head_tolerances import gradient_tolerance, statistics_dtype, value_tolerance
from torch import Tensor

from lowpeak import DivergenceOutput, fused_divergence

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Pair:
    """Two heads over the same rows; the student's targets say which rows count."""

    student: Case
    teacher: Case
    beta: float

    @property
    def mask(self) -> Tensor:
        """The rows that count."""
        return self.student.targets != -100


@dataclass(frozen=True)
class PairEvaluation:
    """Values and gradients of one evaluation, all detached."""

    divergence: Tensor
    entropy: Tensor
    gradients: dict[str, Any]
    largest_logit: float = 0.0


def make_pair(
    rows: int | tuple[int, ...],
    vocabulary: int,
    beta: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    width: int = 12,
    teacher_width: int = 20,
    student_transform: Transform = IDENTITY,
    teacher_transform: Transform = IDENTITY,
    seed: int = 0,
    **options: Any,
) -> Pair:
    """Independent normal heads; options are those of make_case, for both."""
    student, teacher = (
        make_case(
            rows, vocabulary, size, dtype, device, seed=seed + i, transform=transform, **options
        )
        for i, (size, transform) in enumerate(
            ((width, student_transform), (teacher_width, teacher_transform))
        )
    )
    return Pair(student, teacher, beta)


def call(pair: Pair, leaves: Mapping[str, Tensor], **options: Any) -> DivergenceOutput:
    """fused_divergence of a pair on the student's leaves."""
    return fused_divergence(
        leaves["hidden"],
        leaves["weight"],
        pair.teacher.hidden,
        pair.teacher.weight,
        beta=pair.beta,
        student_bias=leaves.get("bias"),
        teacher_bias=pair.teacher.bias,
        student_transform=public_transform(pair.student.transform),
        teacher_transform=public_transform(pair.teacher.transform),
        **{"mask": pair.mask, **options},
    )


def run(
    pair: Pair, upstream: Tensor | None = None, frozen: Iterable[str] = (), **options: Any
) -> PairEvaluation:
    """Values and gradients of fused_divergence."""
    leaves = pair.student.leaves(frozen)
    result = call(pair, leaves, **options)
    if upstream is not None:
        result.divergence.backward(upstream)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    return PairEvaluation(
        result.divergence.detach(), result.student_entropy, {"bias": None, **gradients}
    )


def divergence_of(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence [...] of two sets of transformed logits [..., V]."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    no_q, no_p = torch.isneginf(log_q), torch.isneginf(log_p)
    log_m = torch.zeros_like(log_q)
    if 0 < beta < 1:
        weighted = (log_q + math.log(1 - beta)).masked_fill(no_q & no_p, 0.0)
        log_m = torch.logaddexp(weighted, log_p + math.log(beta))
    log_q, log_p = log_q.masked_fill(no_q, 0.0), log_p.masked_fill(no_p, 0.0)
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1)
    if beta == 1:
        return (q * (log_q - log_p)).sum(-1)
    return (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)


def evaluate(
    pair: Pair,
    upstream: Tensor | None,
    logits_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> PairEvaluation:
    """The oracle: products in logits_dtype, everything after them in dtype."""
    leaves = {name: x.detach() for name, x in pair.student.leaves().items()}
    leaves = {name: x.to(logits_dtype).requires_grad_() for name, x in leaves.items()}
    student = transformed_logits(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), pair.student.transform, dtype
    )
    teacher = pair.teacher.to(logits_dtype)
    teacher_logits = transformed_logits(
        teacher.hidden, teacher.weight, teacher.bias, teacher.transform, dtype
    )
    divergence = divergence_of(student, teacher_logits, pair.beta)
    log_q = student.detach().log_softmax(-1)
    entropy = -(log_q.exp() * log_q.masked_fill(torch.isneginf(log_q), 0.0)).sum(-1)
    divergence = divergence.where(pair.mask, torch.zeros_like(divergence))
    if upstream is not None:
        divergence.backward(upstream.to(dtype))
    finite = [x[torch.isfinite(x)] for x in (student.detach(), teacher_logits)]
    return PairEvaluation(
        divergence.detach(),
        entropy.where(pair.mask, torch.zeros_like(entropy)),
        {"bias": None, **{name: leaf.grad for name, leaf in leaves.items()}},
        max(map(largest, finite)),
    )


def upstream_for(pair: Pair, seed: int = 1) -> Tensor:
    """Random upstream gradients in the dtype of the statistics."""
    generator = torch.Generator().manual_seed(seed)
    shape = pair.mask.shape
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(pair.mask.device, statistics_dtype(pair.student.hidden.dtype))


def assert_exact(
    pair: Pair,
    *,
    upstream: Tensor | None = None,
    frozen: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> PairEvaluation:
    """fused_divergence of the pair is exact: values, gradients, and their dtypes.

    Values are held against float32 logits in every half precision: that is what they promise.
    """
    compute_dtype = compute_dtype or pair.student.hidden.dtype
    wide = statistics_dtype(compute_dtype)
    upstream = upstream_for(pair) if upstream is None else upstream
    ours = run(pair, upstream, frozen, **options)
    true, plain = evaluate(pair, upstream), evaluate(pair, None, wide, wide)
    for name in ("divergence", "entropy"):
        found, expected = getattr(ours, name), getattr(true, name)
        assert found.shape == pair.mask.shape, name
        assert found.dtype == wide, name
        assert (found >= 0).all(), name
        reference = error(getattr(plain, name), expected)
        allowed = value_tolerance(reference, true.largest_logit, wide)
        assert error(found, expected) <= allowed, (name, error(found, expected), allowed)
    half = evaluate(pair, upstream, compute_dtype, wide)
    assert_gradients(pair, ours, true, half, upstream, frozen, compute_dtype)
    return ours


def assert_gradients(
    pair: Pair,
    ours: PairEvaluation,
    true: PairEvaluation,
    plain: PairEvaluation,
    upstream: Tensor,
    frozen: Iterable[str],
    compute_dtype: torch.dtype,
) -> None:
    """The gradients lie within the tolerances of `plain`, the yardstick in `compute_dtype`."""
    temperature = pair.student.transform.temperature
    if isinstance(temperature, Tensor):
        temperature = float(temperature.min()) if temperature.numel() else 1.0
    # the largest gradient of a logit: q (log q - log p - KL) is bounded by 2 KL + 1
    steepest = largest(upstream) * abs(pair.student.transform.scale) / temperature
    steepest *= 2 * largest(true.divergence) + 1
    student = pair.student
    operands = {"hidden": student.weight, "weight": student.hidden, "bias": torch.ones(1)}
    for name, operand in operands.items():
        leaf, gradient = getattr(student, name), ours.gradients[name]
        if leaf is None or name in frozen:
            assert gradient is None, name
            continue
        assert gradient.dtype == leaf.dtype, name
        expected = true.gradients[name]
        allowed = gradient_tolerance(
            error(plain.gradients[name], expected),
            largest(expected),
            steepest * largest(operand),
            leaf.dtype,
            compute_dtype,
        )
        assert error(gradient, expected) <= allowed, (name, error(gradient, expected), allowed)
