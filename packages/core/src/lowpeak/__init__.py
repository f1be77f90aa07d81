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
        LMHeadOutput,
        LogitTransform,
        fused_divergence,
        fused_lm_head,
    )
    from .models import reduce_memory

_HOMES = {
    "DivergenceOutput": "lm_head",
    "LMHeadOutput": "lm_head",
    "LogitTransform": "lm_head",
    "MemoryConfig": "config",
    "fused_divergence": "lm_head",
    "fused_lm_head": "lm_head",
    "reduce_memory": "models",
}

__all__ = [
    "DivergenceOutput",
    "LMHeadOutput",
    "LogitTransform",
    "MemoryConfig",
    "fused_divergence",
    "fused_lm_head",
    "reduce_memory",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowpeak' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
