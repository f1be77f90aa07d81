"""Causal attention within documents: through the varlen kernel where it serves, else by blocks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

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
    result = varlen_attn(query, key, value, ends, ends, longest, longest, **_options(window, scale))
    assert isinstance(result, Tensor)  # it returns more only where asked to
    return result


def _options(window: int | None, scale: float) -> dict[str, Any]:
    # The kernel counts the tokens before the query's own.
    left = -1 if window is None else window - 1
    return {"scale": scale, "window_size": (left, 0), **_GROUPED_HEADS}


def varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] and logs of the softmax denominators [Hq, T] of the varlen kernel.

    Args:
        query: [T, Hq, D].
        key: [Tk, Hkv, D].
        value: [Tk, Hkv, D].
        bounds: [documents + 1] int32 each, the ends of the documents' queries and of their keys.
            The queries of a document are the last of its keys: so the kernel aligns causality.
        longest: most queries, and most keys, of a document.
        window: see `blockwise_attention`.
        scale: factor of the scores.
    """
    result = varlen_attn(
        query,
        key,
        value,
        *bounds,
        *longest,
        return_aux=AuxRequest(lse=True),
        **_options(window, scale),
    )
    assert isinstance(result, tuple)
    return result


def varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `varlen_forward`.

    `varlen_attn` would have them too, but keeps the keys and values it was given until then.
    """
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        output,
        log_sums,
        *bounds,
        *longest,
        0.0,  # dropout
        window is None,
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # random state, for dropout
        torch.empty(0, device=query.device),
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return gradients


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
