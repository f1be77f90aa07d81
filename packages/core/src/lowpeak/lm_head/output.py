"""What the fused head returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

OUTPUT_NAMES = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "log_normalizer",
    "is_top1",
)
DIFFERENTIABLE_NAMES = OUTPUT_NAMES[:-1]


class LMHeadOutput(NamedTuple):
    """Per-token statistics with the shape of the targets; None where not asked for.

    float32 (float64 for float64 inputs) but for `is_top1`; 0 (False) where the target is ignored.
    With z the transformed logits of a token and p = softmax(z):
    """

    log_probs: Tensor | None = None
    """log p[target]."""
    entropy: Tensor | None = None
    """-sum_j p_j log p_j, in nats."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_j p_j^2."""
    mean_logits: Tensor | None = None
    """Mean of z over the vocabulary."""
    log_normalizer: Tensor | None = None
    """log sum_j exp z_j."""
    is_top1: Tensor | None = None
    """bool: the target has the largest logit; False on a tie with an earlier id. No gradient."""
