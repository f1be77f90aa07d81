"""Exact attention for packed rows and sliding windows, without any mask of tokens by tokens."""

from .choice import (
    AttentionChoice,
    AttentionHandle,
    choose_attention,
    current_attention,
    use_attention,
    why_no_shared_prefixes,
)
from .forward import register_attention

__all__ = [
    "AttentionChoice",
    "AttentionHandle",
    "choose_attention",
    "current_attention",
    "register_attention",
    "use_attention",
    "why_no_shared_prefixes",
]
