"""`fused_top_k_divergence`: a student's head against a table of a teacher's likeliest tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_head, check_options
from .divergence import DivergenceOutput, Head
from .divergence_bucket_ops import Buckets
from .divergence_checks import check_beta, check_mask
from .divergence_rows import assert_divergence_rows, given, select_divergence_rows
from .rows import gathered, placed
from .transform import LogitTransform

_IDENTITY = LogitTransform()
_INFINITE = -float("inf")
# A table whose probabilities add up to more than this was not made by one softmax.
_LARGEST_SUM = 1.0 + 1e-2


class TopKLogProbs(NamedTuple):
    """The likeliest tokens of a distribution over the vocabulary, and what is left."""

    ids: Tensor
    """[..., k] int64, in any order, no token twice in a row; a negative id is an empty entry."""
    log_probs: Tensor
    """[..., k]: log p of each, normalised over the whole vocabulary; not looked at where empty."""
    tail_log_prob: Tensor | None = None
    """[...]: log of the mass of all other tokens; None: 1 minus the table's, at least 2^-23."""


def fused_top_k_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: TopKLogProbs,
    *,
    beta: float,
    mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    student_transform: LogitTransform = _IDENTITY,
    row_selection: str = "valid",
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> DivergenceOutput:
    """Per-token divergence between a student's head and a table of the teacher's likeliest tokens.

    Both distributions are compared over k + 1 buckets, the table's tokens one by one and all others
    together, with the formulas of `fused_divergence`. Joining tokens never increases a divergence
    (Cover and Thomas, Elements of Information Theory, theorem 2.7.1), so each is a lower bound of
    the one over the whole vocabulary, and is it where the table holds all tokens. The tail bucket
    pulls the student's mass outside the table towards the teacher's, but says nothing about how
    either spreads it.

    The student's logits exist in tiles only, in float32: 2 N V H operations forward, 2 more for
    each of recompute, gradient of hidden and gradient of weight.

    Args:
        student_hidden: [..., H], as for `fused_divergence`.
        student_weight: [V, H].
        teacher: ids [..., k], log_probs [..., k] and maybe tail_log_prob [...], at the temperature
            at which the student is compared. `top_k_log_probs` makes one from a teacher's head.
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for the mixture.
        mask: [...] bool or integer; rows where it is 0 cost nothing and return 0. None: all count.
        student_bias: [V], added to the logits in float32; -inf masks a token.
        student_transform: scale, soft cap and temperature of the student's logits.
        row_selection: as for `fused_lm_head`.
        scratch_bytes: as for `fused_lm_head`; None is 512 MiB on accelerators.
        backend: "triton", "torch" or "auto".

    Returns:
        DivergenceOutput of tensors with the shape of the mask; `student_entropy` is over the whole
        vocabulary.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value; a token twice in a row's
            table; probabilities that add up to more than 1; every token masked; a KL divergence
            that is infinite.
        RuntimeError: when the gradients are differentiated once more.
    """
    check_head("student_", student_hidden, student_weight, student_bias, student_transform)
    check_options(row_selection, scratch_bytes, backend)
    check_beta(beta)
    check_mask(mask, student_hidden)
    _check_table(teacher, student_hidden, student_weight.size(0))
    vocabulary = student_weight.size(0)
    student = Head.of(student_hidden, student_weight, student_bias, student_transform, vocabulary)
    wide = torch.promote_types(student.dtype, torch.float32)
    ids, log_probs = _entries(teacher, wide)
    tail = _tail(teacher, log_probs, ids, vocabulary)

    shape = student_hidden.shape[:-1]
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=student_hidden.device)
    mask = mask.reshape(-1)
    facts = _facts(ids, log_probs, tail, student.bias, mask, beta, vocabulary)
    temperatures, biases = (
        given(student_temperature=student.temperature),
        given(student_bias=student.bias),
    )
    rows = valid = None
    if row_selection == "all" or torch.compiler.is_compiling():
        valid = assert_divergence_rows(mask, temperatures, biases, 0.5, facts)
        ids = ids.where(valid.unsqueeze(1), -1)
    else:
        rows, _ = select_divergence_rows(mask, temperatures, biases, 0.5, further=facts)
        student = student.selected(rows)
        ids, log_probs, tail = (gathered(x, rows) for x in (ids, log_probs, tail))

    table, rest, rest_entropy, *_ = Buckets.apply(  # type: ignore[no-untyped-call]  # torch's
        *student.tensors, student.transform, student.dtype, ids, scratch_bytes, backend
    )
    log_q = torch.cat([table, rest.unsqueeze(1)], 1).log_softmax(1)
    log_p = torch.cat([log_probs, tail.unsqueeze(1)], 1)
    divergence = _divergence(log_q, log_p, float(beta))
    with torch.no_grad():
        entropy = -_expected(log_q, log_q).sum(1) + log_q[:, -1].exp() * rest_entropy
    return DivergenceOutput(
        placed(divergence, rows, valid, shape), placed(entropy, rows, valid, shape)
    )


def _check_table(teacher: TopKLogProbs, hidden: Tensor, vocabulary: int) -> None:
    rows = hidden.shape[:-1]
    if not isinstance(teacher, TopKLogProbs):
        raise TypeError(f"teacher is {type(teacher).__name__}: pass a TopKLogProbs")
    ids, log_probs, tail = teacher
    if ids.dtype != torch.int64:
        raise TypeError(f"teacher.ids has dtype {ids.dtype}: pass int64 token ids")
    if ids.shape[:-1] != rows or ids.dim() != hidden.dim() or not 0 < ids.size(-1) <= vocabulary:
        raise ValueError(
            f"teacher.ids has shape {tuple(ids.shape)}: pass {(*rows, 'k')}, 0 < k <= {vocabulary}"
        )
    for name, x, shape in (("log_probs", log_probs, ids.shape), ("tail_log_prob", tail, rows)):
        if x is None:
            continue
        if not x.is_floating_point():
            raise TypeError(f"teacher.{name} has dtype {x.dtype}: pass a floating-point one")
        if x.shape != shape:
            raise ValueError(f"teacher.{name} has shape {tuple(x.shape)}: pass {tuple(shape)}")
    for name, x in given(ids=ids, log_probs=log_probs, tail_log_prob=tail).items():
        if x.device != hidden.device:
            raise ValueError(
                f"teacher.{name} is on {x.device} and student_hidden on {hidden.device}"
            )


def _entries(teacher: TopKLogProbs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ids and log-probabilities [N, k], the latter -inf where empty."""
    ids = teacher.ids.reshape(-1, teacher.ids.size(-1))
    log_probs = teacher.log_probs.detach().reshape(ids.shape).to(dtype)
    return ids, log_probs.masked_fill(ids < 0, _INFINITE)


def _tail(teacher: TopKLogProbs, log_probs: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """log of the mass outside the table [N]; -inf where the table holds every token."""
    if teacher.tail_log_prob is not None:
        return teacher.tail_log_prob.detach().reshape(-1).to(log_probs.dtype)
    # what rounded probabilities leave of 1 is known to about this
    least = torch.finfo(torch.float32).eps
    tail = (1.0 - log_probs.exp().sum(1)).clamp(min=least).log()
    return tail.masked_fill((ids >= 0).sum(1) == vocabulary, _INFINITE)


def _facts(
    ids: Tensor,
    log_probs: Tensor,
    tail: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    beta: float,
    vocabulary: int,
) -> dict[str, Tensor]:
    """What must be true of the tables of rows that count, by the message for when it is not."""
    skipped = mask == 0
    ordered = ids.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    total = log_probs.exp().sum(1) + tail.exp()
    facts = {
        f"teacher.ids must lie below the student's {vocabulary} tokens": (ids < vocabulary).all(1),
        "teacher.ids holds a token twice in one row": ~twice,
        "teacher's probabilities add up to more than 1": total <= _LARGEST_SUM,
    }
    if beta == 0.0 and bias is not None:
        allowed = bias.take(ids.clamp(0, vocabulary - 1)) > _INFINITE
        facts[
            "student_bias is -inf for tokens to which the teacher gives probability: the KL "
            "divergence is infinite. Leave them out of the table, or take beta > 0"
        ] = (allowed | (log_probs == _INFINITE)).all(1)
    if beta == 1.0:
        everything = (ids >= 0).sum(1) == vocabulary
        some = ((log_probs > _INFINITE) | (ids < 0)).all(1) & ((tail > _INFINITE) | everything)
        facts[
            "teacher gives probability 0 to tokens that the student allows: the KL divergence is "
            "infinite. Leave them out of the table, or take beta < 1"
        ] = some
    return {message: (skipped | fine).all() for message, fine in facts.items()}


def _divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """The divergence [N] of distributions over buckets [N, b]; rounding cannot make it negative."""
    if beta == 0.0:
        value = _expected(log_p, log_p - _finite(log_q, log_p)).sum(1)
    elif beta == 1.0:
        value = _expected(log_q, log_q - _finite(log_p, log_q)).sum(1)
    else:
        neither = (log_q == _INFINITE) & (log_p == _INFINITE)
        weighted = log_q.masked_fill(neither, 0.0) + math.log1p(-beta)
        log_m = torch.logaddexp(weighted, log_p + math.log(beta))
        value = beta * _expected(log_p, log_p - log_m).sum(1)
        value = value + (1 - beta) * _expected(log_q, log_q - log_m).sum(1)
    return value + (value.clamp(min=0.0) - value).detach()


def _finite(x: Tensor, weights: Tensor) -> Tensor:
    """x with 0 where the log-weight is -inf: neither it nor its gradient counts there."""
    return x.masked_fill(weights == _INFINITE, 0.0)


def _expected(log_weights: Tensor, values: Tensor) -> Tensor:
    """w_b v_b, 0 where the weight is 0."""
    nothing = log_weights == _INFINITE
    return log_weights.masked_fill(nothing, 0.0).exp() * values.masked_fill(nothing, 0.0)
