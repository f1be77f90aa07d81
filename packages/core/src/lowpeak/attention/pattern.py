"""The mask function: what hides keys from queries, in a few numbers where a few numbers say it.

transformers asks the mask function registered under the name of an attention for the mask of each
kind of layer, once a forward. It hands over a function of (batch, head, query, key) index; sdpa's
mask function evaluates it everywhere. Here it is read instead: causal, sliding and packed masks of
batches without padding or cache become a `CausalPattern`, which the attention function takes in
the mask's place. Whatever else it is - padding, a cache, image prefixes, chunks - gets sdpa's mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .documents import Documents, documents_from_ids, rows_as_documents

_MODULE = causal_mask_function.__module__


class CausalPattern:
    """Causal attention within documents, through a sliding window or not.

    Args:
        documents: every row is one, or several where `packed`.
        packed: whether the builder of the mask was told of several documents in a row.
        window: a token sees itself and the `window - 1` tokens before it; None sees all of them.
        dense_mask: makes sdpa's mask [B, 1, S, S] of it.
    """

    # Not a dataclass: FSDP rebuilds those it finds among the arguments of a module.
    def __init__(
        self,
        documents: Documents,
        packed: bool,
        window: int | None,
        dense_mask: Callable[[], Tensor | None],
    ) -> None:
        self.documents = documents
        self.packed = packed
        self.window = window
        self.dense_mask = dense_mask


def lowpeak_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | CausalPattern | None:
    """The mask for "lowpeak" attention; arguments and results of transformers' `sdpa_mask`.

    Returns None where causality alone holds, a `CausalPattern` for packed rows and sliding windows
    without padding or cache, and sdpa's mask otherwise. Each call for a batch that comes with an
    attention mask synchronises with the device once, as sdpa's does; packed rows without one,
    twice.
    """

    def dense_mask() -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type] # a static cache gives a tensor
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **options,
        )
        return mask

    cached = isinstance(q_offset, Tensor) or q_offset != 0 or kv_offset != 0
    if cached or q_length != kv_length:
        return dense_mask()
    rule = read_mask_function(mask_function)
    if rule is None or (rule.sequence_ids is None and not allow_is_causal_skip):
        return dense_mask()
    window = None if rule.window is None or rule.window >= q_length else rule.window
    if window is None and rule.sequence_ids is None:
        return dense_mask()
    if attention_mask is not None and not _hides_nothing(attention_mask, kv_length):
        return dense_mask()
    if rule.sequence_ids is None:
        documents = rows_as_documents(batch_size, q_length, device)
    else:
        documents = documents_from_ids(rule.sequence_ids)
    return CausalPattern(documents, rule.sequence_ids is not None, window, dense_mask)


def _hides_nothing(attention_mask: Tensor, length: int) -> bool:
    return attention_mask.shape[-1] == length and bool(attention_mask.all())


@dataclass(frozen=True)
class MaskRule:
    """What a mask function means.

    Args:
        window: see `CausalPattern`.
        sequence_ids: [B, S], equal for tokens of the same document; None: a row is one document.
    """

    window: int | None = None
    sequence_ids: Tensor | None = None


def read_mask_function(mask_function: Callable[..., Any]) -> MaskRule | None:
    """The rule that a mask function of transformers states, or None if it is no causal one.

    transformers composes them out of closures; the names of those and of what they close over are
    the same in 5.17 and 5.24, and a name that is not known makes the answer None.
    """
    pieces = _pieces(mask_function)
    if pieces is None or not pieces.pop("causal", None):
        return None
    return MaskRule(**pieces)


def _pieces(function: Callable[..., Any]) -> dict[str, Any] | None:
    if function is causal_mask_function:
        return {"causal": True}
    if function.__module__ != _MODULE or function.__closure__ is None:
        return None
    names = function.__code__.co_freevars
    closed_over = dict(
        zip(names, (cell.cell_contents for cell in function.__closure__), strict=True)
    )
    match function.__qualname__.partition(".")[0]:
        case "sliding_window_overlay":
            return {"window": closed_over["sliding_window"]}
        case "packed_sequence_mask_function":
            return {"sequence_ids": closed_over["packed_sequence_mask"]}
        case "remap_positions_for_packed_sequence":
            # Positions in a document instead of in the row: within a document the same rule.
            return _pieces(closed_over["mask_function"])
        case "and_masks":
            found: dict[str, Any] = {}
            for part in closed_over["mask_functions"]:
                pieces = _pieces(part)
                if pieces is None or pieces.keys() & found.keys():
                    return None
                found |= pieces
            return found
    return None
