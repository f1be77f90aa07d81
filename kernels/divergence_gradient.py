"""Turn tiles of both heads' raw logits into the gradient of the divergence in the student's logits.

With p the teacher's, q the student's probability of token j, m = beta p + (1 - beta) q, and u the
upstream gradient of the row's divergence D,

    KL(p || q): u (q_j - p_j)
    KL(q || p): u q_j (log q_j - log p_j - D)
    mixture:    u (1 - beta) q_j (log q_j - log m_j - KL(q || m)).

The chain rule of the student's logit transform then gives the gradient of its raw logits.
"""

from __future__ import annotations

from torch import Tensor

from .divergence_fold import Divergence, HeadTile
from .divergence_mixture import PairNormalizers, log_probabilities_torch, log_share_torch
from .logit_transform import transform_slope_torch


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
