"""The fused LM head: log-probabilities, statistics and divergences, never the logits."""

from .divergence import DivergenceOutput, fused_divergence
from .expectation import ExpectationCounts, expectation_counts, reset_expectations
from .head import fused_lm_head
from .output import LMHeadOutput
from .transform import LogitTransform

__all__ = [
    "DivergenceOutput",
    "ExpectationCounts",
    "LMHeadOutput",
    "LogitTransform",
    "expectation_counts",
    "fused_divergence",
    "fused_lm_head",
    "reset_expectations",
]
