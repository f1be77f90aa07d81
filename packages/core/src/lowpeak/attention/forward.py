"""The attention function that transformers' layers call under the name "lowpeak"."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .documents import Documents
from .kernels import document_attention, few_cudnn_plans
from .pattern import CausalPattern, lowpeak_mask
from .shared_prefixes import shared_prefix_attention

NAME = "lowpeak"


def register_attention() -> None:
    """Make `attn_implementation="lowpeak"` known to transformers: attention and masks together.

    It is exact attention, that of "sdpa". Packed rows (`cu_seq_lens_q`, or `position_ids` that
    start again) and sliding windows go through kernels that need no mask; padded batches and calls
    with a key-value cache get sdpa's mask and sdpa's kernel. Calling it again does nothing.
    """
    AttentionInterface.register(NAME, lowpeak_attention)
    AttentionMaskInterface.register(NAME, lowpeak_mask)


def lowpeak_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CausalPattern | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    position_bias: Tensor | None = None,
    shared_prefixes: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, Hq, S, D] to key [B, Hkv, S, D]; returns [B, S, Hq, Dv] and None.

    `shared_prefixes` [documents, 3] says how documents begin: see `shared_prefix_attention`.

    Raises:
        ValueError: for attention sinks and a soft cap, which sdpa has not; for packed rows that
            only a mask could keep apart, when the mask does not; and for shared prefixes with
            anything but causality and a window.
    """
    _refuse(options)
    causal = _is_causal(module, is_causal)
    pattern = attention_mask if isinstance(attention_mask, CausalPattern) else None
    window = None if pattern is None else pattern.window
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    if shared_prefixes is not None:
        masked = isinstance(attention_mask, Tensor) or position_bias is not None
        if masked or dropout > 0 or not causal or query.size(2) != key.size(2):
            raise ValueError(
                "shared_prefixes came with a mask, a position bias, a cache, attention without "
                "causality or dropout in attention: none of them goes with share_prompts=True"
            )
        # Its positions do not start again at each document, so that they tell nothing of those.
        q, k, v = (_tokens(x) for x in (query, key, value))
        output = shared_prefix_attention(q, k, v, shared_prefixes, window=window, scale=scale)
        return output.view(query.size(0), query.size(2), *output.shape[1:]), None
    boundaries = None
    if cu_seq_lens_q is not None and causal and not isinstance(attention_mask, Tensor):
        boundaries = _boundaries(cu_seq_lens_q, max_length_q)
    packed = pattern is not None and pattern.packed
    if packed or boundaries is None:
        boundaries = None if pattern is None else pattern.documents
    same_length = query.size(2) == key.size(2)
    if boundaries is None or dropout > 0 or position_bias is not None or not same_length:
        if boundaries is not None and cu_seq_lens_q is not None and not packed:
            _raise_inseparable(dropout, position_bias)
        mask = attention_mask
        if isinstance(mask, CausalPattern):
            mask = mask.dense_mask()
        if mask is None and causal and same_length and _sdpa_would_materialise(query, key):
            groups = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            output = nn.functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, scale=scaling
            )
            return output.transpose(1, 2).contiguous(), None
        with few_cudnn_plans(query, value) if mask is None else nullcontext():
            result: tuple[Tensor, None] = sdpa_attention_forward(
                module,
                query,
                key,
                value,
                mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                position_bias=position_bias,
                **options,
            )
        return result
    output = document_attention(
        _tokens(query),
        _tokens(key),
        _tokens(value),
        boundaries,
        window=window,
        scale=scale,
    )
    return output.view(query.size(0), query.size(2), *output.shape[1:]), None


def _sdpa_would_materialise(query: Tensor, key: Tensor) -> bool:
    """Whether torch would compute scores of tokens by tokens for want of a kernel.

    On CUDA its kernel for float32 takes no grouped heads: they are repeated for it.
    """
    if not query.is_cuda or query.size(1) == key.size(1):
        return False
    return query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    # As sdpa has it: a layer without the attribute belongs to a decoder.
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _boundaries(cu_seq_lens: Tensor, longest: int | None) -> Documents:
    if longest is None:
        raise ValueError(
            "cu_seq_lens_q came without max_length_q: pass the length of the longest document, "
            "an int, with it"
        )
    return Documents(cu_seq_lens.to(torch.int32), int(longest))


def _tokens(x: Tensor) -> Tensor:
    """[B * S, heads, D] of x [B, heads, S, D], in the dtype that autocast gives to attention."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    return x.transpose(1, 2).flatten(0, 1)


def _refuse(options: dict[str, Any]) -> None:
    for name, what in (("s_aux", "attention sinks"), ("softcap", "a soft cap on its scores")):
        if options.get(name) is not None:
            raise ValueError(
                f"this model's attention has {what} ({name}), which {NAME!r} attention has not: "
                'use attn_implementation="eager" or a kernel made for it, and no packing'
            )


def _raise_inseparable(dropout: float, position_bias: Tensor | None) -> None:
    cause = f"dropout={dropout}" if position_bias is None else "a position bias"
    raise ValueError(
        f"packed rows (cu_seq_lens_q) with {cause} in attention need a mask, and the model made "
        "none that separates the documents: set attention_dropout=0, or train without packing"
    )
