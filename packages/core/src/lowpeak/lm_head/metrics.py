"""Metrics of a language model's head without its logits: forward only, no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.logit_transform import transform_tile_torch
from .checks import check_head, check_options, check_targets
from .divergence import Head
from .divergence_checks import check_mask
from .divergence_passes import wide_scratch_bytes
from .divergence_rows import given, select_divergence_rows
from .divergence_top_k import TopKLogProbs
from .gemm import product_into
from .metrics_pass import MetricsPass, RowMetrics
from .rows import gathered, select_rows
from .tiles import HeadInputs, slice_or_none
from .transform import LogitTransform

_IDENTITY = LogitTransform()


class LMHeadMetrics(NamedTuple):
    """Per-token metrics with the shape of the targets; None where not asked for.

    Where the target is ignored ids and ranks are -1, the others 0 (False).
    """

    argmax: Tensor
    """[...] int64: the token with the largest logit, the smallest id among equals."""
    is_correct: Tensor
    """[...] bool: argmax is the target."""
    log_probs: Tensor
    """[...]: log p of the target; float32 (float64 for float64 inputs), as the others."""
    target_rank: Tensor | None = None
    """[...] int64, 0 for the best: the number of tokens with a larger logit than the target, and of
    those with the same logit and a smaller id."""
    top_k: TopKLogProbs | None = None
    """[..., k] ids and log-probabilities in falling order; which of equal ones is left open."""
    top_k_hit: Tensor | None = None
    """[...] bool: the target is one of `top_k`."""
    candidate_log_probs: Tensor | None = None
    """[..., C]: log p of the candidates."""


@torch.no_grad()
def lm_head_metrics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rank: bool = False,
    top_k: int | None = None,
    candidates: Tensor | None = None,
    bias: Tensor | None = None,
    transform: LogitTransform = _IDENTITY,
    ignore_index: int = -100,
    scratch_bytes: int | None = None,
) -> LMHeadMetrics:
    """Accuracy, ranks, likeliest tokens and candidates' log-probabilities without the logits.

    The logits exist in float32 tiles only, 2 N V H operations; `rank` takes a second pass where a
    tile does not hold the whole vocabulary. There is no gradient. Perplexity, label smoothing and
    z-loss need no metric: they come from the differentiable outputs of `fused_lm_head`, see its
    page in the documentation.

    Args:
        hidden: [..., H], float64, float32, bfloat16 or float16, any strides.
        weight: [V, H]. Products are computed in the dtypes that `fused_lm_head` takes, and kept in
            float32 (float64).
        targets: [...] int64, the shape of `hidden` without its last dimension.
        rank: whether to compute `target_rank`.
        top_k: how many of the likeliest tokens to return, at most V.
        candidates: [..., C] or [C] int64 in [0, V): tokens whose log-probabilities are wanted, such
            as the answers of a multiple-choice question. Repeats are allowed.
        bias: [V], added to the logits in float32; -inf masks a token.
        transform: scale, soft cap and temperature.
        ignore_index: rows with this target cost nothing.
        scratch_bytes: as for `fused_lm_head`; None is 512 MiB on accelerators.

    Raises:
        IndexError: a target is neither `ignore_index` nor in [0, V), or a candidate not in [0, V).
        ValueError, TypeError: an argument's shape, dtype, device or value; every token masked.
    """
    check_head("", hidden, weight, bias, transform)
    check_targets(targets, hidden)
    check_options("valid", scratch_bytes, "auto")
    vocabulary = weight.size(0)
    _check_top_k(top_k, vocabulary)
    asked = _asked(targets, candidates, vocabulary)
    head = Head.of(hidden, weight, bias, transform, vocabulary)
    flat = targets.reshape(-1)
    rows = select_rows(flat, vocabulary, ignore_index, head.temperature, bias)
    head, flat = head.selected(rows), gathered(flat, rows)
    walk = MetricsPass(head.inputs, asked.size(1), top_k or 0, scratch_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        found = walk.run(gathered(asked, rows), top_k or 0)
        ahead = walk.tokens_ahead(flat, found.asked[:, 0]) if rank else None

    place = _Place(rows, targets.shape)
    normalizer = found.log_normalizer.unsqueeze(1)
    log_probs = found.asked - normalizer
    table = hit = None
    if top_k is not None:
        table = _table(found, place)
        hit = place((found.top_ids == flat.unsqueeze(1)).any(1), False)
    return LMHeadMetrics(
        argmax=place(found.argmax, -1),
        is_correct=place(found.argmax == flat, False),
        log_probs=place(log_probs[:, 0], 0.0),
        target_rank=None if ahead is None else place(ahead, -1),
        top_k=table,
        top_k_hit=hit,
        candidate_log_probs=None if candidates is None else place(log_probs[:, 1:], 0.0),
    )


@torch.no_grad()
def top_k_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = _IDENTITY,
    mask: Tensor | None = None,
    scratch_bytes: int | None = None,
) -> TopKLogProbs:
    """The k likeliest tokens of each row and the mass of all others, without the logits.

    What `fused_top_k_divergence` takes for a teacher: made once, it stands in for the teacher's
    head in every epoch, in k + 1 numbers and k ids a token.

    Args:
        hidden: [..., H], as for `lm_head_metrics`.
        weight: [V, H].
        k: from 1 to V.
        bias: [V], added to the logits in float32; -inf masks a token.
        transform: scale, soft cap and temperature.
        mask: [...] bool or integer; rows where it is 0 cost nothing: ids -1, log-probabilities and
            tail 0. None: all count.
        scratch_bytes: as for `lm_head_metrics`.

    Returns:
        TopKLogProbs in falling order; float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value; every token masked.
    """
    check_head("", hidden, weight, bias, transform)
    check_options("valid", scratch_bytes, "auto")
    check_mask(mask, hidden)
    vocabulary, shape = weight.size(0), hidden.shape[:-1]
    _check_top_k(k, vocabulary)
    head = Head.of(hidden, weight, bias, transform, vocabulary)
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    checked = given(temperature=head.temperature), given(bias=bias)
    rows, _ = select_divergence_rows(mask.reshape(-1), *checked, 0.5)
    head = head.selected(rows)
    nothing = torch.empty(head.hidden.size(0), 0, dtype=torch.int64, device=hidden.device)
    walk = MetricsPass(head.inputs, 0, k, scratch_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        found = walk.run(nothing, k)
    return _table(found, _Place(rows, shape))


def logit_tiles(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = _IDENTITY,
    scratch_bytes: int | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """A head's logits a few tokens at a time, for metrics that no function here computes.

    Yields (rows, logits): a slice of the flattened rows, and their transformed logits [n, V] in
    float32 (float64 for float64 inputs), all rows in order. A tile is a tensor of its own; keep it
    and its memory is kept. There is no gradient.

    Args:
        hidden: [..., H], as for `lm_head_metrics`.
        weight: [V, H].
        bias: [V], added to the logits in float32; -inf masks a token.
        transform: scale, soft cap and temperature.
        scratch_bytes: for a tile and one temporary of its size; at least one row is made. None is a
            default by device type. A cast of the weight comes on top.

    Raises:
        ValueError, TypeError: an argument's shape, dtype, device or value.
    """
    check_head("", hidden, weight, bias, transform)
    check_options("valid", scratch_bytes, "auto")
    inputs = Head.of(hidden, weight, bias, transform, weight.size(0)).inputs.selected(None)
    budget = wide_scratch_bytes(scratch_bytes, hidden.device.type)
    rows = max(1, budget // (2 * inputs.statistics_dtype.itemsize * weight.size(0)))
    return _tiles(inputs, rows)


def _tiles(inputs: HeadInputs, rows: int) -> Iterator[tuple[slice, Tensor]]:
    total = inputs.hidden.size(0)
    weight = inputs.weight.detach().to(inputs.compute_dtype)
    for first in range(0, total, rows):
        part = slice(first, min(first + rows, total))
        yield part, _logits(inputs, weight, part)


@torch.no_grad()
def _logits(inputs: HeadInputs, weight: Tensor, part: slice) -> Tensor:
    hidden = inputs.hidden[part].to(inputs.compute_dtype)
    tile = torch.empty(
        hidden.size(0), weight.size(0), dtype=inputs.tile_dtype, device=hidden.device
    )
    with torch.autocast(hidden.device.type, enabled=False):
        product_into(tile, hidden, weight.t())
    temperature = slice_or_none(inputs.temperature, part.start, part.stop)
    return transform_tile_torch(
        tile, inputs.bias, temperature, inputs.transform, inputs.statistics_dtype
    )


def _check_top_k(top_k: int | None, vocabulary: int) -> None:
    if top_k is None:
        return
    if not isinstance(top_k, int):
        raise TypeError(f"top_k={top_k!r}: pass a whole number")
    if not 0 < top_k <= vocabulary:
        raise ValueError(f"top_k={top_k}: pass a number from 1 to {vocabulary}")


def _asked(targets: Tensor, candidates: Tensor | None, vocabulary: int) -> Tensor:
    """[N, 1 + C]: the target and the candidates of each row."""
    flat = targets.reshape(-1, 1)
    if candidates is None:
        return flat
    if not isinstance(candidates, Tensor):
        raise TypeError(f"candidates is {candidates!r}: pass a tensor")
    if candidates.dtype != torch.int64:
        raise TypeError(f"candidates has dtype {candidates.dtype}: pass int64 token ids")
    if candidates.dim() != 1 and candidates.shape[:-1] != targets.shape:
        raise ValueError(
            f"candidates has shape {tuple(candidates.shape)}: pass (C,) or {(*targets.shape, 'C')}"
        )
    if candidates.device != targets.device:
        raise ValueError(f"candidates is on {candidates.device} and targets on {targets.device}")
    if candidates.numel() and bool(((candidates < 0) | (candidates >= vocabulary)).any()):
        raise IndexError(f"candidates holds ids outside [0, {vocabulary})")
    count = candidates.size(-1)
    wide = candidates.expand(*targets.shape, count).reshape(flat.size(0), count)
    return torch.cat([flat, wide], 1)


class _Place:
    """Puts what was computed for some rows where they belong."""

    def __init__(self, rows: Tensor | None, shape: torch.Size) -> None:
        self._rows, self._shape = rows, shape

    def __call__(self, value: Tensor, otherwise: float) -> Tensor:
        if self._rows is not None:
            full = value.new_full((self._shape.numel(), *value.shape[1:]), otherwise)
            value = full.index_copy_(0, self._rows, value)
        return value.reshape(*self._shape, *value.shape[1:])


def _table(found: RowMetrics, place: _Place) -> TopKLogProbs:
    normalizer = found.log_normalizer
    return TopKLogProbs(
        place(found.top_ids, -1),
        place(found.top_logits - normalizer.unsqueeze(1), 0.0),
        place(found.rest_log_sum - normalizer, 0.0),
    )
