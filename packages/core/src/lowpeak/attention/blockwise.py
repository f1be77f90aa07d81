"""Exact causal attention within documents, by blocks of queries: no tensor of tokens by tokens.

The forward keeps the log of each row's softmax denominator, and the backward recomputes a block of
probabilities from it (Dao et al., 2022, algorithm 4), so that nothing but [tokens] statistics
lives between the two. Documents of one length are computed together. Works on any device and in
any float dtype; sums are made in float32, or in float64 for float64 inputs.

A document may have more keys than queries; its queries are then the last of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Scores that live at a time: 4 MiB in float32, twice that in the backward.
_SCRATCH_ELEMENTS = 1 << 20
_LONGEST_BLOCK = 256
# Of a sliding window below this, queries are still taken so many at a time.
_SHORTEST_WINDOW_BLOCK = 128
_SHORTEST_BLOCK = 16

Rows = slice | Tensor

# Ends of documents on the host, with the version of the tensor they were read from: one read serves
# all layers of a step, forward and backward.
_on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention of each token to its own document. Returns [T, Hq, Dv] in query's dtype.

    Args:
        query: [T, Hq, D], the tokens of all documents one after the other.
        key: [T, Hkv, D], Hkv a divisor of Hq; of query's dtype.
        value: [T, Hkv, Dv]; of query's dtype.
        cu_seq_lens: [documents + 1] integers, 0, then the end of each document.
        window: a token sees itself and the `window - 1` tokens before it; None sees all of them.
        scale: factor of the scores before the softmax.

    Raises:
        ValueError: for shapes, dtypes or document lengths that do not fit together, and for a
            window below 1.
    """
    _check(query, key, value, window)
    result: Tensor
    result, _ = _forward_op(query, key, value, cu_seq_lens, window or 0, scale)
    return result


def _check(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: "
            "convert them to one dtype"
        )
    if query.dim() != 3 or key.dim() != 3 or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "are not [tokens, heads, features] with as many values as keys"
        )
    if key.size(0) != query.size(0) or key.size(2) != query.size(2):
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} differ in tokens or features"
        )
    if query.size(1) % key.size(1) != 0:
        raise ValueError(
            f"{query.size(1)} heads of queries are no multiple of {key.size(1)} heads of keys"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window} is below 1: pass None for attention without a window")


@dataclass(frozen=True)
class _Part:
    """Documents of one length that are computed together.

    Args:
        rows: where their tokens are among all queries.
        key_rows: where they are among all keys.
        count: number of documents.
        length: queries of each of them.
        before: keys of each before that of its first query.
        block: queries at a time.
    """

    rows: Rows
    key_rows: Rows
    count: int
    length: int
    before: int
    block: int

    def blocks(self, window: int) -> Iterator[tuple[slice, slice]]:
        """Queries a block at a time, and the keys that some of them can see."""
        for start in range(0, self.length, self.block):
            stop = min(start + self.block, self.length)
            first = max(0, self.before + start - window + 1) if window else 0
            yield slice(start, stop), slice(first, self.before + stop)


def _parts(
    ends: list[int], key_ends: list[int], heads: int, window: int, device: torch.device
) -> Iterator[_Part]:
    """Documents grouped by their lengths; as many at a time as the scratch memory allows."""
    starts_by_lengths: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (start, end), (key_start, key_end) in zip(pairwise(ends), pairwise(key_ends), strict=True):
        if end > start:
            lengths = (end - start, key_end - key_start)
            starts_by_lengths.setdefault(lengths, []).append((start, key_start))
    for (length, keys), starts in starts_by_lengths.items():
        block = _block_size(length, keys, heads, window)
        seen = _seen_at_most(block, keys, window)
        together = max(1, _SCRATCH_ELEMENTS // (heads * block * seen))
        for first in range(0, len(starts), together):
            chosen, key_starts = zip(*starts[first : first + together], strict=True)
            rows = _rows(chosen, length, device)
            key_rows = rows if ends == key_ends else _rows(key_starts, keys, device)
            yield _Part(rows, key_rows, len(chosen), length, keys - length, block)


def _checked_ends(cu_seq_lens: Tensor, tokens: int) -> list[int]:
    ends = _ends(cu_seq_lens)
    if ends[0] != 0 or ends[-1] != tokens or any(a > b for a, b in pairwise(ends)):
        raise ValueError(
            f"cu_seq_lens goes from {ends[0]} to {ends[-1]} over {tokens} tokens: it must hold 0, "
            "then the end of each document, and end with the number of tokens"
        )
    return ends


def _ends(cu_seq_lens: Tensor) -> list[int]:
    if cu_seq_lens.device.type == "cpu" or cu_seq_lens.is_inference():  # those have no version
        return list(cu_seq_lens.tolist())
    version, ends = _on_host.get(cu_seq_lens, (-1, []))  # type: ignore[no-untyped-call]
    if version != cu_seq_lens._version:
        ends = cu_seq_lens.tolist()
        _on_host[cu_seq_lens] = (cu_seq_lens._version, ends)
    return list(ends)


def _block_size(length: int, keys: int, heads: int, window: int) -> int:
    block = min(length, max(window, _SHORTEST_WINDOW_BLOCK) if window else _LONGEST_BLOCK)
    while block > _SHORTEST_BLOCK:
        if heads * block * _seen_at_most(block, keys, window) <= _SCRATCH_ELEMENTS:
            break
        block = (block + 1) // 2
    return block


def _seen_at_most(block: int, keys: int, window: int) -> int:
    return min(keys, block + window - 1) if window else keys


def _rows(starts: Sequence[int], length: int, device: torch.device) -> Rows:
    if starts[-1] - starts[0] == (len(starts) - 1) * length:
        return slice(starts[0], starts[0] + len(starts) * length)
    first = torch.tensor(starts, device=device).unsqueeze(1)
    return (first + torch.arange(length, device=device)).flatten()


def _by_head(x: Tensor, part: _Part, groups: int, dtype: torch.dtype) -> Tensor:
    """[documents, Hkv, groups, length, ...] of x [T, heads, ...], in `dtype`."""
    chosen = x[part.rows].to(dtype)
    shape = (part.count, part.length, x.size(1) // groups, groups, *x.shape[2:])
    return chosen.reshape(shape).permute(0, 2, 3, 1, *range(4, len(shape)))


def _keys_by_head(x: Tensor, part: _Part, dtype: torch.dtype) -> Tensor:
    """[documents, Hkv, keys, D] of the keys or values x [Tk, Hkv, D], in `dtype`."""
    chosen = x[part.key_rows].to(dtype)
    return chosen.reshape(part.count, -1, *x.shape[1:]).transpose(1, 2).contiguous()


def _by_token(x: Tensor) -> Tensor:
    """The inverse of `_by_head`: [documents * length, heads, ...]."""
    moved = x.permute(0, 3, 1, 2, *range(4, x.dim()))
    return moved.flatten(0, 1).flatten(1, 2)


def _scores(
    query: Tensor,
    key: Tensor,
    part: _Part,
    block: tuple[slice, slice],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Scores [documents, Hkv, groups, block, keys] of a block of queries; its queries.

    Hidden keys score -inf. The queries come as [documents, Hkv, groups * block, D].
    """
    rows, keys = block
    queries = query[:, :, :, rows].flatten(2, 3)
    scores = torch.matmul(queries, key[:, :, keys].transpose(-1, -2)).mul_(scale)
    scores = scores.view(*query.shape[:3], rows.stop - rows.start, keys.stop - keys.start)
    position = torch.arange(rows.start, rows.stop, device=query.device).unsqueeze(1) + part.before
    seen = torch.arange(keys.start, keys.stop, device=query.device)
    hidden = seen > position
    if window:
        hidden |= seen <= position - window
    return scores.masked_fill_(hidden, -float("inf")), queries


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: list[int],
    key_ends: list[int],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, Dv], and the log of each row's softmax denominator [T, Hq]. No autograd.

    Args:
        query: [T, Hq, D].
        key: [Tk, Hkv, D].
        value: [Tk, Hkv, Dv].
        ends: 0, then the end of each document's queries.
        key_ends: 0, then the end of its keys, the last of which are those of its queries.
        window: 0 for attention without one.
        scale: factor of the scores.
    """
    dtype, groups = _sum_dtype(query), query.size(1) // key.size(1)
    output = query.new_empty(*query.shape[:2], value.size(2))
    log_sums = query.new_empty(query.shape[:2], dtype=dtype)
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(ends, key_ends, query.size(1), window, query.device):
            q = _by_head(query, part, groups, dtype)
            k, v = (_keys_by_head(x, part, dtype) for x in (key, value))
            found = q.new_empty(*q.shape[:-1], v.size(-1))
            found_log_sums = q.new_empty(q.shape[:-1])
            for rows, keys in part.blocks(window):
                scores, _ = _scores(q, k, part, (rows, keys), window, scale)
                largest = scores.amax(-1, keepdim=True)
                probs = scores.sub_(largest).exp_()
                sums = probs.sum(-1, keepdim=True)
                found_log_sums[..., rows] = (largest + sums.log()).squeeze(-1)
                mixed = torch.matmul(probs.flatten(2, 3), v[:, :, keys])
                found[..., rows, :] = mixed.view(*probs.shape[:4], -1).div_(sums)
            output[part.rows] = _by_token(found).to(output.dtype)
            log_sums[part.rows] = _by_token(found_log_sums)
    return output, log_sums


@torch.library.custom_op("lowpeak::blockwise_attention", mutates_args=())
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    ends = _checked_ends(cu_seq_lens, query.size(0))
    return attend_by_blocks(query, key, value, ends, ends, window, scale)


@_forward_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    output = query.new_empty(*query.shape[:2], value.size(2))
    return output, query.new_empty(query.shape[:2], dtype=_sum_dtype(query))


def gradients_by_blocks(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    ends: list[int],
    key_ends: list[int],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for `grad`, that of what `attend_by_blocks` returned."""
    dtype, groups = log_sums.dtype, query.size(1) // key.size(1)
    grads = tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    with torch.autocast(query.device.type, enabled=False):
        for part in _parts(ends, key_ends, query.size(1), window, query.device):
            q = _by_head(query, part, groups, dtype)
            k, v = (_keys_by_head(x, part, dtype) for x in (key, value))
            out_grad = _by_head(grad, part, groups, dtype)
            inner = (out_grad * _by_head(output, part, groups, dtype)).sum(-1)
            sums = _by_head(log_sums, part, groups, dtype)
            dq = q.new_empty(q.shape)
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for rows, keys in part.blocks(window):
                scores, queries = _scores(q, k, part, (rows, keys), window, scale)
                probs = scores.sub_(sums[..., rows, None]).exp_()
                flat = probs.flatten(2, 3)
                block_grad = out_grad[:, :, :, rows].flatten(2, 3)
                dv[:, :, keys] += torch.matmul(flat.transpose(-1, -2), block_grad)
                dp = torch.matmul(block_grad, v[:, :, keys].transpose(-1, -2))
                ds = dp.sub_(inner[..., rows].flatten(2, 3).unsqueeze(-1))
                ds = ds.mul_(flat).mul_(scale)
                dq[..., rows, :] = torch.matmul(ds, k[:, :, keys]).view(*probs.shape[:4], -1)
                dk[:, :, keys] += torch.matmul(ds.transpose(-1, -2), queries)
            places = (part.rows, part.key_rows, part.key_rows)
            found = (dq, dk.unsqueeze(2), dv.unsqueeze(2))
            for target, place, x in zip(grads, places, found, strict=True):
                target[place] = _by_token(x).to(target.dtype)
    return grads[0], grads[1], grads[2]


@torch.library.custom_op("lowpeak::blockwise_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seq_lens: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    ends = _checked_ends(cu_seq_lens, query.size(0))
    return gradients_by_blocks(grad, query, key, value, output, log_sums, ends, ends, window, scale)


@_backward_op.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    cu_seq_lens: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seq_lens, ctx.window, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _backward_op(grad, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*found, None, None, None)


_forward_op.register_autograd(_gradients, setup_context=_save)
