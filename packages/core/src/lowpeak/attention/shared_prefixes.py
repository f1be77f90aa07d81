"""Exact attention in a row whose documents may begin with tokens of earlier documents.

Such a document holds its remaining tokens only; its keys and values are gathered: those of the
prefix from where they were computed, then its own. One kernel call serves, in which a document's
queries are the last of its keys. What was gathered is not kept for the backward but gathered again,
and the gradients of a key that several documents saw are summed in float32 (float64 for float64) in
a fixed order, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .blockwise import attend_by_blocks, gradients_by_blocks
from .kernels import varlen_backward, varlen_forward, varlen_serves

# Pieces of the row: first token, and one past the last.
Pieces = list[tuple[int, int]]


def shared_prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefixes: Tensor,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention of each token to its own document. Returns [T, Hq, Dv] in query's dtype.

    Args:
        query: [T, Hq, D], the tokens of all documents one after the other.
        key: [T, Hkv, D], Hkv a divisor of Hq; of query's dtype.
        value: [T, Hkv, Dv]; of query's dtype.
        prefixes: [documents, 3] integers, best on the CPU, where reading them costs nothing. For
            each document the number of its own tokens, the index of the earlier document that it
            begins like, and the number of tokens that it takes over from that one, which may have
            taken over some itself; 0 for none. What is derived from it is kept as long as it lives.
        window: a token sees itself and the `window - 1` tokens before it; None sees all of them.
        scale: factor of the scores before the softmax.

    Raises:
        ValueError: for documents that do not fit together or to the tokens.
    """
    result: Tensor
    result, _ = _forward_op(query, key, value, prefixes, window or 0, scale)
    return result


@dataclass(frozen=True)
class SharedKeys:
    """Which tokens of a row the documents see.

    Args:
        ends: 0, then the end of each document's own tokens among the T of the row.
        key_ends: 0, then the end of its keys among all Tk.
        index: [Tk] int64, the token of the row that each key is.
    """

    ends: list[int]
    key_ends: list[int]
    index: Tensor

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Most own tokens, and most keys, of a document."""
        return _longest(self.ends), _longest(self.key_ends)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """`ends` and `key_ends` in int32 on the device of `index`."""
        both = torch.tensor([self.ends, self.key_ends], dtype=torch.int32, device=self.index.device)
        return both[0], both[1]

    @cached_property
    def _uses(self) -> tuple[Tensor, Tensor]:
        """Keys in the order of the tokens they are; where those of each token begin, [T]."""
        tokens, uses = self.index.sort(stable=True)
        rows = torch.arange(self.ends[-1], device=tokens.device)
        return uses, torch.searchsorted(tokens, rows)

    def gather(self, x: Tensor) -> Tensor:
        """[Tk, ...] of x [T, ...]."""
        return x.index_select(0, self.index)

    def sum_uses(self, grad: Tensor) -> Tensor:
        """[T, ...], the gradient of what `gather` took, for the gradient [Tk, ...] of its result.

        An embedding bag sums a token's uses one after the other in float32, and rounds once.
        """
        uses, begins = self._uses
        summed = nn.functional.embedding_bag(uses, grad.flatten(1), begins, mode="sum")
        return summed.view(-1, *grad.shape[1:])


def _longest(ends: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(ends))


def shared_keys(prefixes: Tensor, window: int, device: torch.device) -> SharedKeys:
    """What `prefixes` (see `shared_prefix_attention`) means through a window, 0 for none.

    Of a prefix the last `window - 1` tokens are enough. One sort and a few copies to the device,
    for all layers of a step together.
    """
    if prefixes.is_inference():  # those have no version
        return _build(prefixes, window, device)
    version, found = _built.get(prefixes, (-1, {}))  # type: ignore[no-untyped-call]
    if version != prefixes._version:
        found = {}
        _built[prefixes] = (prefixes._version, found)
    if (window, device) not in found:
        found[window, device] = _build(prefixes, window, device)
    keys: SharedKeys = found[window, device]
    return keys


_built: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _build(prefixes: Tensor, window: int, device: torch.device) -> SharedKeys:
    rows = prefixes.tolist()
    ends = [0, *accumulate(own for own, _, _ in rows)]
    whole: list[Pieces] = []  # of each document
    seen: list[Pieces] = []
    for document, (own, owner, shared) in enumerate(rows):
        prefix: Pieces = []
        if shared > 0 and 0 <= owner < document:
            prefix = _first(whole[owner], shared)
        if own < 1 or sum(b - a for a, b in prefix) != shared:
            raise ValueError(
                f"document {document} has {own} tokens of its own and {shared} of document {owner}:"
                " it needs one of its own at least, and shares tokens of an earlier document only"
            )
        itself = (ends[document], ends[document + 1])
        whole.append([*prefix, itself])
        seen.append([*(_last(prefix, window - 1) if window else prefix), itself])
    counts = [sum(b - a for a, b in pieces) for pieces in seen]
    every = [piece for pieces in seen for piece in pieces]
    sizes = [b - a for a, b in every]
    key_ends = [0, *accumulate(counts)]
    # the first token of each piece, less the number of keys before it
    offsets = [a - n for (a, _), n in zip(every, accumulate(sizes, initial=0), strict=False)]
    steps = torch.tensor([offsets, sizes], device=device)
    index = steps[0].repeat_interleave(steps[1], output_size=key_ends[-1])
    return SharedKeys(ends, key_ends, index + torch.arange(key_ends[-1], device=device))


def _first(pieces: Pieces, count: int) -> Pieces:
    chosen: Pieces = []
    for start, stop in pieces:
        if count > 0:
            chosen.append((start, min(stop, start + count)))
            count -= stop - start
    return chosen


def _last(pieces: Pieces, count: int) -> Pieces:
    chosen: Pieces = []
    for start, stop in reversed(pieces):
        if count > 0:
            chosen.append((max(start, stop - count), stop))
            count -= stop - start
    return chosen[::-1]


@torch.library.custom_op("lowpeak::shared_prefix_attention", mutates_args=())
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, prefixes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, Dv], and the logs of the softmax denominators: [T, Hq], varlen's [Hq, T]."""
    shared = shared_keys(prefixes, window, query.device)
    if shared.ends[-1] != query.size(0):
        raise ValueError(
            f"shared_prefixes describes {shared.ends[-1]} tokens of {query.size(0)}: its first "
            "column must hold the number of tokens of each document of the row"
        )
    keys, values = shared.gather(key), shared.gather(value)
    if not _by_varlen(query, value, window):
        return attend_by_blocks(query, keys, values, shared.ends, shared.key_ends, window, scale)
    return varlen_forward(query, keys, values, shared.bounds, shared.lengths, window or None, scale)


def _by_varlen(query: Tensor, value: Tensor, window: int) -> bool:
    # The shape of ROCm's logs is another from version to version of torch.
    return torch.version.hip is None and varlen_serves(query, value, window or None)


@_forward_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, prefixes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    shape = query.shape[:2]
    if _by_varlen(query, value, window):
        return torch.empty_like(query), query.new_empty(shape[::-1], dtype=torch.float32)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*shape, value.size(2)), query.new_empty(shape, dtype=dtype)


@torch.library.custom_op("lowpeak::shared_prefix_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    prefixes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    shared = shared_keys(prefixes, window, query.device)
    inputs = (query, shared.gather(key), shared.gather(value), output, log_sums)
    if _by_varlen(query, value, window):
        dq, dk, dv = varlen_backward(
            grad, *inputs, shared.bounds, shared.lengths, window or None, scale
        )
    else:
        dq, dk, dv = gradients_by_blocks(grad, *inputs, shared.ends, shared.key_ends, window, scale)
    return dq, shared.sum_uses(dk), shared.sum_uses(dv)


@_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    prefixes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # Not saved with the others: a hook on saved tensors may give back a copy of it, for which
    # everything would be derived again, layer by layer.
    query, key, value, ctx.prefixes, ctx.window, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _backward_op(grad, *ctx.saved_tensors, ctx.prefixes, ctx.window, ctx.scale)
    return (*found, None, None, None)


_forward_op.register_autograd(_gradients, setup_context=_save)
