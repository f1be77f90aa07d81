"""The divergence of distillation where a head is not the plain matrix that its tiles assume."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits and log-softmax of both models, the mixture, and the gradient of each are alive at once.
_LIVE_COPIES_OF_A_TILE = 12
_DEFAULT_TILE_BYTES = 256 * 2**20

Logits = Callable[[Tensor], Tensor]


def own_divergence(
    student_hidden: Tensor,
    student_logits: Logits,
    teacher_hidden: Tensor,
    teacher_logits: Logits,
    *,
    beta: float,
    temperature: float,
    mask: Tensor,
    vocabulary: int,
    scratch_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    """Divergence and student entropy [...], as `lowpeak.fused_divergence`, 0 where masked.

    The logits [n, V] of a tile of hidden states [n, H] come from the models' own modules, and are
    computed again in the backward.

    Args:
        student_hidden: [..., H].
        student_logits: logits of a tile of them.
        teacher_hidden: [..., Ht].
        teacher_logits: logits of a tile of them.
        beta: see `lowpeak.fused_divergence`.
        temperature: of both softmaxes.
        mask: [...], 0 for what does not count.
        vocabulary: how many of the first tokens are compared.
        scratch_bytes: for the tiles; None is 256 MiB.
    """
    keep = mask != 0
    student_rows, teacher_rows = student_hidden[keep], teacher_hidden[keep]
    budget = _DEFAULT_TILE_BYTES if scratch_bytes is None else scratch_bytes
    tile = max(1, budget // (4 * vocabulary * _LIVE_COPIES_OF_A_TILE))

    def compare(student_tile: Tensor, teacher_tile: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = teacher_logits(teacher_tile)
        return divergence_of_logits(
            student_logits(student_tile)[:, :vocabulary] / temperature,
            teacher[:, :vocabulary] / temperature,
            beta,
        )

    if student_rows.size(0) == 0:  # nothing of one row: zeros with every parameter in their graph
        first = [h.reshape(-1, h.size(-1))[:1] for h in (student_hidden, teacher_hidden)]
        columns = [column[:0] for column in compare(*first)]
    else:
        pairs = zip(torch.split(student_rows, tile), torch.split(teacher_rows, tile), strict=True)
        tiles = [checkpoint(compare, *pair, use_reentrant=False) for pair in pairs]
        columns = [torch.cat(parts) for parts in zip(*tiles, strict=True)]
    divergence, entropy = (
        column.new_zeros(keep.shape).masked_scatter(keep, column) for column in columns
    )
    return divergence, entropy.detach()


def divergence_of_logits(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence and student entropy [N] of logits [N, V], in float32 or float64.

    KL(teacher || student) for beta 0, KL(student || teacher) for beta 1, else the generalised
    Jensen-Shannon divergence (arXiv 2306.13649).
    """
    log_q, log_p = (
        (z if z.dtype == torch.float64 else z.float()).log_softmax(-1) for z in (student, teacher)
    )
    if beta == 0.0:
        divergence = _kl(log_p, log_q)
    elif beta == 1.0:
        divergence = _kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        divergence = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return divergence, -_expectation(log_q, log_q)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return _expectation(log_a, log_a - log_b)


def _expectation(log_weights: Tensor, values: Tensor) -> Tensor:
    """sum_j w_j v_j, where a weight of 0 contributes 0, never 0 * inf."""
    impossible = log_weights == -math.inf
    return (log_weights.exp() * values.masked_fill(impossible, 0.0)).sum(-1)
