"""Sum the divergences of two known softmaxes from their mixture over a tile, one row a program.

With p the teacher's, q the student's probability of a token, m = beta p + (1 - beta) q and
d = log p - log q, the larger of p and q serves as the unit:

    log(m / p) = log(1 - (1 - beta) (1 - exp(-d))),  log(m / q) = log(m / p) + d   where d > 0,
    log(m / q) = log(1 - beta (1 - exp(d))),         log(m / p) = log(m / q) - d   elsewhere.

Nothing overflows where the supports are disjoint, and equal distributions give exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .divergence_fold import HeadTile


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
