"""Causal attention within documents: through the varlen kernel where it serves, else by blocks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    cudnn_sdp_enabled,
    enable_cudnn_sdp,
    flash_sdp_enabled,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from .blockwise import blockwise_attention
from .documents import Documents

LARGEST_HEAD_DIM = 256
# cuDNN makes a plan for each length it meets, which takes time and memory: lengths that are no
# multiple of this seldom come again, while those that a limit or a filling sets do.
_CUDNN_STEP = 512
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

    On CUDA in bf16 and fp16 it is `torch.nn.attention.varlen`, with grouped heads as they are, and
    cuDNN for documents of one length where `cudnn_serves`.
    """
    documents = documents.to(query.device)
    if not varlen_serves(query, value, window):
        return blockwise_attention(
            query, key, value, documents.cu_seq_lens, window=window, scale=scale
        )
    if window is None and cudnn_serves(query, key, value, documents):
        return _cudnn_attention(query, key, value, documents.longest, scale)
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


def cudnn_serves(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> bool:
    """Whether cuDNN takes these heads, and documents that are all of one length.

    On an H200 it takes 16.9 ms, forward and backward, for 32768 tokens of gemma-3's four heads,
    where the varlen kernel takes 28.3.
    """
    length = documents.longest
    # the longest of them can only be an upper bound
    if length * (documents.cu_seq_lens.numel() - 1) != query.size(0) or not _comes_again(length):
        return False
    if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled():
        return False
    if torch.version.hip is not None or not cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    q, k, v = (_by_document(x, length) for x in (query, key, value))
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))


def few_cudnn_plans(query: Tensor, value: Tensor) -> AbstractContextManager[None]:
    """Let sdpa take cuDNN only for lengths that come again, where FlashAttention serves without it.

    query, value: [B, heads, S, D]; there is no mask.
    """
    if torch.compiler.is_compiling() or _comes_again(query.size(2)):
        return nullcontext()
    if torch.version.hip is not None or not varlen_serves(query, value, None):
        return nullcontext()
    both = cudnn_sdp_enabled() and flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return _without_cudnn() if both else nullcontext()


def _comes_again(length: int) -> bool:
    """Whether cuDNN's plan for it is likely to be used again."""
    return length % _CUDNN_STEP == 0


@contextmanager
def _without_cudnn() -> Iterator[None]:
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(True)


def _by_document(x: Tensor, length: int) -> Tensor:
    """[documents, heads, length, D] of x [T, heads, D]."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


def _cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, length: int, scale: float
) -> Tensor:
    q, k, v = (_by_document(x, length) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output: Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    return output.transpose(1, 2).flatten(0, 1)


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
