"""Causal attention within documents: through the varlen kernel where it serves, else by blocks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from .blockwise import blockwise_attention
from .documents import Documents

LARGEST_HEAD_DIM = 256
# torch 2.11 has no such argument, and takes fewer heads of keys than of queries as they are.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention within documents. Arguments and result of `blockwise_attention`.

    On CUDA in bf16 and fp16 it is `torch.nn.attention.varlen`, with grouped heads as they are.
    """
    documents = documents.to(query.device)
    if not varlen_serves(query, value, window):
        return blockwise_attention(
            query, key, value, documents.cu_seq_lens, window=window, scale=scale
        )
    ends, longest = documents.cu_seq_lens, documents.longest
    result = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        # The kernel counts the tokens before the query's own.
        window_size=(-1 if window is None else window - 1, 0),
        **_GROUPED_HEADS,
    )
    assert isinstance(result, Tensor)  # it returns more only where asked to
    return result


def varlen_serves(query: Tensor, value: Tensor, window: int | None) -> bool:
    """Whether the varlen kernel takes these heads: its limits are those of FlashAttention 2."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    head_dim = query.size(-1)
    if head_dim != value.size(-1) or head_dim % 8 != 0 or head_dim > LARGEST_HEAD_DIM:
        return False
    if torch.version.hip is not None:
        return window is None
    return torch.cuda.get_device_capability(query.device) >= (8, 0)
