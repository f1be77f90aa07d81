"""The fused LM head: log-probabilities, statistics and divergences, never the logits."""

from .divergence import DivergenceOutput, fused_divergence
from .head import fused_lm_head
from .output import LMHeadOutput
from .transform import LogitTransform

__all__ = [
    "DivergenceOutput",
    "LMHeadOutput",
    "LogitTransform",
    "fused_divergence",
    "fused_lm_head",
]
