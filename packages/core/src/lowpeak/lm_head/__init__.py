"""The fused LM head: log-probabilities, statistics and divergences, never the logits."""

from .divergence import DivergenceOutput, fused_divergence
from .divergence_top_k import TopKLogProbs, fused_top_k_divergence
from .expectation import ExpectationCounts, expectation_counts, reset_expectations
from .head import fused_lm_head
from .low_rank import LowRank
from .metrics import LMHeadMetrics, lm_head_metrics, logit_tiles, top_k_log_probs
from .output import LMHeadOutput
from .serves import single_pass_serves
from .transform import LogitTransform

__all__ = [
    "DivergenceOutput",
    "ExpectationCounts",
    "LMHeadMetrics",
    "LMHeadOutput",
    "LogitTransform",
    "LowRank",
    "TopKLogProbs",
    "expectation_counts",
    "fused_divergence",
    "fused_lm_head",
    "fused_top_k_divergence",
    "lm_head_metrics",
    "logit_tiles",
    "reset_expectations",
    "single_pass_serves",
    "top_k_log_probs",
]
