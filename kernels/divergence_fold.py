"""Fold a tile of two heads' raw logits into running statistics of both softmaxes.

With s, t the logits of student and teacher and m_s, m_t their running maxima, a KL divergence needs
one sum beside the normalisers, of w_j ((t_j - m_t) - (s_j - m_s)): w_j is exp(t_j - m_t) for
KL(teacher || student) and exp(s_j - m_s) for KL(student || teacher). Everything is centred, so that
nothing cancels at large logit offsets, and a token of weight 0 contributes 0, never 0 * inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .logit_transform import TileTransform, transform_tile_torch

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
