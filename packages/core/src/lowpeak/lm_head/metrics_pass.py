"""Running metrics of a head's rows: tiles of logits from the BLAS library, torch for the rest.

No gradient needs them, so that no kernel of our own pays here: a tile in float32 is read some ten
times, which costs about as much as its product at a hidden size of 1000.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.logit_transform import transform_tile_torch
from .divergence_passes import wide_scratch_bytes
from .planner import TileCost
from .tiles import HeadInputs, TileWalk, head_plan, slice_or_none, tile_cost

_INFINITE = -float("inf")
# positions, whether they lie in the tile, and values with a temporary, for ids and top-k alike
_BYTES_PER_ENTRY = 48


@dataclass(frozen=True)
class RowMetrics:
    """Metrics of N rows over the vocabulary seen so far; the rest is what is outside the top k."""

    largest: Tensor  # [N] largest logit z
    argmax: Tensor  # [N] int64, the first id that has it
    asked: Tensor  # [N, A] z of the ids that were asked for
    top_logits: Tensor  # [N, k] in falling order
    top_ids: Tensor  # [N, k] int64
    rest_largest: Tensor  # [N] largest z of the rest
    rest_sum: Tensor  # [N] sum_j exp(z_j - rest_largest) over the rest

    @classmethod
    def empty(
        cls, rows: int, asked: int, top_k: int, dtype: torch.dtype, device: torch.device
    ) -> RowMetrics:
        """Metrics of an empty vocabulary."""

        def full(value: float, *columns: int) -> Tensor:
            return torch.full((rows, *columns), value, dtype=dtype, device=device)

        def ids(*columns: int) -> Tensor:
            return torch.full((rows, *columns), -1, dtype=torch.int64, device=device)

        return cls(
            largest=full(_INFINITE),
            argmax=ids(),
            asked=full(_INFINITE, asked),
            top_logits=full(_INFINITE, top_k),
            top_ids=ids(top_k),
            rest_largest=full(_INFINITE),
            rest_sum=full(0.0),
        )

    @property
    def rest_log_sum(self) -> Tensor:
        """log sum_j exp z_j over the rest; -inf where there is none."""
        return self.rest_largest + self.rest_sum.log()

    @property
    def log_normalizer(self) -> Tensor:
        """log sum_j exp z_j."""
        return torch.cat([self.top_logits, self.rest_log_sum.unsqueeze(1)], 1).logsumexp(1)

    def rows(self, start: int, end: int) -> RowMetrics:
        """Views of rows [start, end)."""
        return RowMetrics(**{name: field[start:end] for name, field in vars(self).items()})


@dataclass(frozen=True)
class _Tile:
    first: int
    last: int
    start: int
    z: Tensor


class MetricsPass:
    """Walks a head's logits; the same tiles each time, and so bitwise the same logits."""

    def __init__(
        self, inputs: HeadInputs, asked: int, top_k: int, scratch_bytes: int | None
    ) -> None:
        self._inputs = inputs
        self._walk: TileWalk | None = None
        if inputs.hidden.size(0):
            cost = tile_cost(inputs, False, False, False)
            cost += TileCost(0, 0, _BYTES_PER_ENTRY * (asked + top_k))
            scratch_bytes = wide_scratch_bytes(scratch_bytes, inputs.hidden.device.type)
            self._walk = TileWalk(inputs, head_plan(inputs, "forward", cost, scratch_bytes))

    def _tiles(self) -> Iterator[_Tile]:
        walk, inputs = self._walk, self._inputs
        if walk is None:
            return
        for start, end, block in walk.vocabulary_blocks():
            bias = slice_or_none(inputs.bias, start, end)
            for first, last in walk.row_blocks():
                temperature = slice_or_none(inputs.temperature, first, last)
                z = transform_tile_torch(
                    walk.logits(first, last, block),
                    bias,
                    temperature,
                    inputs.transform,
                    inputs.statistics_dtype,
                )
                yield _Tile(first, last, start, z)

    def run(self, asked: Tensor, top_k: int) -> RowMetrics:
        """All metrics of the rows; `asked` [N, A] int64 ids."""
        inputs = self._inputs
        rows, device = inputs.hidden.size(0), inputs.hidden.device
        metrics = RowMetrics.empty(rows, asked.size(1), top_k, inputs.statistics_dtype, device)
        for tile in self._tiles():
            part = metrics.rows(tile.first, tile.last)
            if asked.size(1):
                _look_up(tile, asked[tile.first : tile.last], part.asked)
            _merge_largest(tile, part)
            dropped = _merge_top(tile, part) if top_k else None
            _merge_rest(tile, part, dropped)
        return metrics

    def tokens_ahead(self, targets: Tensor, target_logits: Tensor) -> Tensor:
        """Number [N] of tokens with a larger logit than the target, or its logit and smaller id."""
        ahead = torch.zeros_like(targets)
        for tile in self._tiles():
            rows = slice(tile.first, tile.last)
            logits, target = target_logits[rows, None], targets[rows, None] - tile.start
            count = (tile.z > logits).sum(1)
            columns = torch.arange(tile.z.size(1), device=targets.device)
            count += ((tile.z == logits) & (columns < target)).sum(1)
            ahead[rows] += count
        return ahead


def _look_up(tile: _Tile, ids: Tensor, found: Tensor) -> None:
    local = ids - tile.start
    width = tile.z.size(1)
    inside = (local >= 0) & (local < width)
    here = tile.z.gather(1, local.clamp(0, width - 1))
    found.copy_(torch.where(inside, here, found))


def _merge_largest(tile: _Tile, part: RowMetrics) -> None:
    largest, column = tile.z.max(1)
    better = largest > part.largest
    part.argmax.copy_(torch.where(better, column + tile.start, part.argmax))
    part.largest.copy_(torch.where(better, largest, part.largest))


def _merge_top(tile: _Tile, part: RowMetrics) -> Tensor:
    """Take the tile's largest out of it; what they displace from the top k is returned."""
    kept = part.top_logits.size(1)
    values, columns = tile.z.topk(min(kept, tile.z.size(1)), dim=1)
    tile.z.scatter_(1, columns, _INFINITE)
    ids = torch.cat([part.top_ids, columns + tile.start], 1)
    # the earlier ids come first: a stable sort keeps them so among equals
    merged = torch.cat([part.top_logits, values], 1)
    values, order = merged.sort(stable=True, dim=1, descending=True)
    part.top_logits.copy_(values[:, :kept])
    part.top_ids.copy_(ids.gather(1, order[:, :kept]))
    return values[:, kept:]


def _merge_rest(tile: _Tile, part: RowMetrics, dropped: Tensor | None) -> None:
    """Add the tile, and what was dropped before it, to the rest. Destroys the tile."""
    new = torch.maximum(part.rest_largest, tile.z.amax(1))
    if dropped is not None:
        new = torch.maximum(new, dropped.amax(1))
    centre = torch.where(new == _INFINITE, 0.0, new)
    part.rest_sum.mul_(torch.exp(part.rest_largest - centre))
    part.rest_sum.add_(tile.z.sub_(centre.unsqueeze(1)).exp_().sum(1))
    if dropped is not None:
        part.rest_sum.add_((dropped - centre.unsqueeze(1)).exp().sum(1))
    part.rest_largest.copy_(new)
