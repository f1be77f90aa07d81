"""lowpeak: post-train language models on far longer sequences with the same GPU memory.

Public names are imported on first use, so that `import lowpeak` needs neither Triton nor
transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import MemoryConfig
    from .lm_head import (
        DivergenceOutput,
        LMHeadMetrics,
        LMHeadOutput,
        LogitTransform,
        LowRank,
        TopKLogProbs,
        fused_divergence,
        fused_lm_head,
        fused_top_k_divergence,
        lm_head_metrics,
        logit_tiles,
        top_k_log_probs,
    )
    from .models import reduce_memory

_HOMES = {
    "DivergenceOutput": "lm_head",
    "LMHeadMetrics": "lm_head",
    "LMHeadOutput": "lm_head",
    "LogitTransform": "lm_head",
    "LowRank": "lm_head",
    "MemoryConfig": "config",
    "TopKLogProbs": "lm_head",
    "fused_divergence": "lm_head",
    "fused_lm_head": "lm_head",
    "fused_top_k_divergence": "lm_head",
    "lm_head_metrics": "lm_head",
    "logit_tiles": "lm_head",
    "reduce_memory": "models",
    "top_k_log_probs": "lm_head",
}

__all__ = [
    "DivergenceOutput",
    "LMHeadMetrics",
    "LMHeadOutput",
    "LogitTransform",
    "LowRank",
    "MemoryConfig",
    "TopKLogProbs",
    "fused_divergence",
    "fused_lm_head",
    "fused_top_k_divergence",
    "lm_head_metrics",
    "logit_tiles",
    "reduce_memory",
    "top_k_log_probs",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowpeak' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
