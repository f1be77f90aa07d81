"""Logits of scored tokens, a few at a time, for whoever watches a fused call in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowpeak.lm_head import LogitTransform, logit_tiles

from .inspection import Head
from .self_test import Route

_IGNORE_INDEX = -100
# Through the model's own modules: logits, their float32 copy and a temporary of the watcher's.
_LIVE_COPIES_OF_A_TILE = 3
_DEFAULT_TILE_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class LogitTile:
    """The logits of n tokens that have a target, over the whole vocabulary of V.

    What is derived from them is computed when it is first asked for, and has the definitions of
    `lm_head_metrics`.
    """

    logits: Tensor
    """[n, V] float32 (float64 for a float64 model), as the model's forward returns them: scaled and
    soft-capped, but not divided by a temperature."""
    targets: Tensor
    """[n] int64: the token that each row predicts."""
    positions: Tensor
    """[n] int64: where in its document the token is that predicts it, 0 for the first."""

    @cached_property
    def target_logits(self) -> Tensor:
        """[n]: the logit of the target."""
        return self.logits.gather(1, self.targets.unsqueeze(1)).squeeze(1)

    @cached_property
    def log_normalizers(self) -> Tensor:
        """[n]: log sum_v exp z_v."""
        return self.logits.logsumexp(1)

    @cached_property
    def target_log_probs(self) -> Tensor:
        """[n]: log p of the target."""
        return self.target_logits - self.log_normalizers

    @cached_property
    def top_log_probs(self) -> Tensor:
        """[n]: log p of the likeliest token."""
        return self.logits.amax(1) - self.log_normalizers

    @cached_property
    def target_ranks(self) -> Tensor:
        """[n] int64, 0 for the best: the number of tokens with a larger logit than the target, and
        of those with the same logit and a smaller id."""
        logits, targets = self.target_logits.unsqueeze(1), self.targets.unsqueeze(1)
        columns = torch.arange(self.logits.size(1), device=self.logits.device)
        ahead = (self.logits > logits).sum(1)
        return ahead + ((self.logits == logits) & (columns < targets)).sum(1)


Watch = Callable[[LogitTile], None]

_watch: ContextVar[Watch | None] = ContextVar("lowpeak_logit_watch", default=None)


@contextmanager
def watching_logits(watch: Watch | None) -> Iterator[None]:
    """Let `watch` see the logits of all tokens that fused calls in this context score.

    It is called with a `LogitTile` at a time, after the call's own outputs were computed, from the
    same hidden states: 2 N V H operations, and no second pass through the backbone. Calls that
    record a graph (training) show nothing. A tile and a temporary of its size fit into the
    `scratch_bytes` of the fused forward, or its default; a tile that is kept keeps its memory. None
    hides the calls from whoever watches around.
    """
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def show_logits(
    route: Route,
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    arguments: Mapping[str, Any],
    scratch_bytes: int | None,
) -> None:
    """Show the watcher of the context, if there is one, the logits of a call.

    Args:
        route: how its log-probabilities were computed.
        head: that of the call.
        hidden: [batch, length, H].
        targets: [batch, length], -100 where there is nothing to score.
        arguments: those of the backbone.
        scratch_bytes: see `watching_logits`.
    """
    watch = _watch.get()
    if watch is None:
        return
    scored = targets != _IGNORE_INDEX
    rows, of_rows = hidden[scored], targets[scored]
    positions = _positions(targets, arguments)[scored]
    for part, logits in _tiles(route, head, rows, scratch_bytes):
        watch(LogitTile(logits, of_rows[part], positions[part]))


def _tiles(
    route: Route, head: Head, rows: Tensor, scratch_bytes: int | None
) -> Iterator[tuple[slice, Tensor]]:
    if route.transform is None or head.adapters.low_rank:
        yield from _own_tiles(route, head, rows, scratch_bytes)
        return
    transform = LogitTransform(route.transform.scale, route.transform.softcap)
    yield from logit_tiles(
        rows, head.weight, bias=head.bias, transform=transform, scratch_bytes=scratch_bytes
    )


def _own_tiles(
    route: Route, head: Head, rows: Tensor, scratch_bytes: int | None
) -> Iterator[tuple[slice, Tensor]]:
    budget = _DEFAULT_TILE_BYTES if scratch_bytes is None else scratch_bytes
    size = max(1, budget // (4 * head.weight.size(0) * _LIVE_COPIES_OF_A_TILE))
    for first in range(0, rows.size(0), size):
        part = slice(first, min(first + size, rows.size(0)))
        logits = route.own_head.logits(rows[part])
        yield part, logits if logits.dtype == torch.float64 else logits.float()


def _positions(targets: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """[batch, length]: where in its document each token is."""
    given, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if isinstance(given, Tensor) and given.dim() == 2:
        return given.to(targets.device).expand(targets.shape)
    if isinstance(mask, Tensor) and mask.shape == targets.shape:
        return (mask.to(targets.device) != 0).cumsum(1) - 1
    return torch.arange(targets.size(1), device=targets.device).expand(targets.shape)
