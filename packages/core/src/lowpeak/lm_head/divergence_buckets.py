"""A head's logits as buckets: some tokens one by one, all others as one; values and gradients.

The tokens of a row's table leave its tile, so that what is folded, and differentiated, is the
softmax of the others alone. Nothing cancels where the table holds nearly all of the mass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch, fold_tile_triton
from ..kernels.lm_head_gradient import RowCoefficients, gradient_tile_torch, gradient_tile_triton
from ..kernels.logit_transform import transform_slope_torch, transform_tile_torch
from .backward import HeadGradients
from .divergence_passes import wide_scratch_bytes
from .planner import TileCost
from .statistics import power_of_two
from .tiles import HeadInputs, TileWalk, head_plan, slice_or_none, tile_cost, use_triton

BUCKET_NAMES = ("table_logits", "rest_log_sum", "rest_entropy", "rest_centre", "rest_sum")

_INFINITE = -float("inf")
# positions, whether they lie in the tile, and two temporaries of the statistics' dtype
_BYTES_PER_ENTRY = 32
_FOLDED = Folded(entropy=True)


def run_buckets_forward(
    inputs: HeadInputs, ids: Tensor, scratch_bytes: int | None, backend: str
) -> dict[str, Tensor]:
    """What BUCKET_NAMES lists, for the tables `ids` [N, k]; a negative id is an empty entry.

    table_logits [N, k] are z of the entries (-inf for an empty one), the others [N]: logsumexp and
    entropy of the other tokens' z, their largest, and their sum of exp(z - largest).
    """
    inputs = _with_bias(inputs)
    rows, device, dtype = inputs.hidden.size(0), inputs.hidden.device, inputs.statistics_dtype
    scratch_bytes = wide_scratch_bytes(scratch_bytes, device.type)
    table = torch.full(ids.shape, _INFINITE, dtype=dtype, device=device)
    sums = RowStatistics.empty(rows, _FOLDED, dtype, device)
    if rows:
        triton = use_triton(backend, inputs)
        fold = fold_tile_triton if triton else fold_tile_torch
        cost = tile_cost(inputs, triton, False, False) + _table_cost(ids)
        walk = TileWalk(inputs, head_plan(inputs, "forward", cost, scratch_bytes))
        for tile in _tiles(walk, ids):
            tile.read(table[tile.first : tile.last])
            tile.remove_table()
            part = sums.rows(tile.first, tile.last)
            fold(*tile.logits_and_bias, *tile.row_arguments, part, tile.start, inputs.transform,
                 _FOLDED)  # fmt: skip
    bias = None if inputs.bias is None else inputs.bias.take(ids.clamp(min=0))
    z = transform_tile_torch(table, bias, inputs.temperature, inputs.transform, dtype)
    log_sum = sums.sum_exp.log()
    entropy = torch.where(sums.sum_exp > 0, log_sum - sums.centred / sums.sum_exp, 0.0)
    values = (z, sums.maximum + log_sum, entropy.clamp_(min=0.0), sums.maximum, sums.sum_exp)
    return dict(zip(BUCKET_NAMES, values, strict=True))


def run_buckets_backward(
    inputs: HeadInputs,
    ids: Tensor,
    results: dict[str, Tensor],
    upstream: tuple[Tensor, Tensor],
    needs: tuple[bool, bool, bool],
    scratch_bytes: int | None,
    backend: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias from those of table_logits [N, k], rest_log_sum [N]."""
    inputs = _with_bias(inputs)
    of_table, of_rest = _raw_gradients(inputs, results["table_logits"], upstream[0]), upstream[1]
    power = None
    if inputs.compute_dtype == torch.float16 and ids.size(0):
        largest = torch.cat([of_table.abs().amax().view(1), (of_rest * inputs.slope).abs()]).amax()
        power = power_of_two(largest)
        of_table, of_rest = of_table / power, of_rest / power
    gradients = HeadGradients(inputs, needs, power)
    if ids.size(0) == 0:
        return gradients.zeros()
    triton = use_triton(backend, inputs)
    scratch_bytes = wide_scratch_bytes(scratch_bytes, ids.device.type)
    gradient_of = gradient_tile_triton if triton else gradient_tile_torch
    walk = gradients.plan(triton, scratch_bytes, _table_cost(ids))
    buffer = walk.gradient_buffer()
    coefficients = _coefficients(results, of_rest)
    for tile in _tiles(walk, ids):
        tile.remove_table()
        out = walk.gradient_tile(buffer, tile.logits)
        part = coefficients.rows(tile.first, tile.last)
        gradient_of(*tile.logits_and_bias, *tile.row_arguments, part, tile.start, inputs.transform,
                    out)  # fmt: skip
        tile.add_to_table(out, of_table[tile.first : tile.last])
        rows = (tile.first, tile.last)
        columns = (tile.start, tile.start + tile.block.size(0))
        gradients.add(out, rows, columns, tile.block, walk.hidden[tile.first : tile.last])
        if tile.last == ids.size(0):
            gradients.finish_block(*columns)
    return gradients.finish()


def _with_bias(inputs: HeadInputs) -> HeadInputs:
    """The head with a bias, be it 0: kernels keep a raw logit of -inf only beside one."""
    if inputs.bias is not None or (not inputs.transform.softcap and inputs.transform.scale > 0):
        return inputs
    zeros = torch.zeros(
        inputs.weight.size(0), dtype=inputs.statistics_dtype, device=inputs.weight.device
    )
    return replace(inputs, bias=zeros)


def _table_cost(ids: Tensor) -> TileCost:
    return TileCost(0, 0, _BYTES_PER_ENTRY * ids.size(1))


def _raw_gradients(inputs: HeadInputs, z: Tensor, upstream: Tensor) -> Tensor:
    """Gradients of the table's raw logits from those of its z [N, k]; 0 where z is -inf."""
    masked = z == _INFINITE
    gradient = upstream.masked_fill(masked, 0.0)
    slope = transform_slope_torch(z.masked_fill(masked, 0.0), inputs.temperature, inputs.transform)
    return gradient if slope is None else gradient * slope


def _coefficients(results: dict[str, Tensor], of_rest: Tensor) -> RowCoefficients:
    """d rest_log_sum / d z_j is the softmax of the others, 0 where there are none."""
    some = results["rest_sum"] > 0
    zeros = torch.zeros_like(of_rest)
    return RowCoefficients(
        centre=torch.where(some, results["rest_centre"], 0.0),
        inverse_sum=torch.where(some, results["rest_sum"].reciprocal(), 0.0),
        log_sum=torch.where(some, results["rest_sum"].log(), 0.0),
        linear=of_rest,
        target=zeros,
        target_rest=zeros,
        log_linear=None,
        square=None,
        constant=None,
    )


@dataclass(frozen=True)
class _Tile:
    """A tile of raw logits, and where its rows' tables point into it."""

    first: int
    last: int
    start: int
    block: Tensor
    logits: Tensor
    bias: Tensor | None
    no_target: Tensor
    temperature: Tensor | None
    positions: Tensor
    inside: Tensor

    @property
    def logits_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self.logits, self.bias

    @property
    def row_arguments(self) -> tuple[Tensor, Tensor | None]:
        """No target, and the rows' temperatures."""
        return self.no_target, self.temperature

    def read(self, table: Tensor) -> None:
        """Write the raw logits of the entries that lie in this tile into `table`."""
        found = self.logits.gather(1, self.positions).to(table.dtype)
        table.copy_(torch.where(self.inside, found, table))

    def remove_table(self) -> None:
        """Set the raw logits of the entries to -inf; no order of the writes changes that."""
        lowest = torch.where(self.inside, _INFINITE, -_INFINITE).to(self.logits.dtype)
        self.logits.scatter_reduce_(1, self.positions, lowest, "amin")

    def add_to_table(self, out: Tensor, gradients: Tensor) -> None:
        """Add the entries' gradients, at most one a column, to `out`, which holds 0 there."""
        zero = torch.where(self.inside, gradients, 0.0).to(out.dtype)
        out.scatter_add_(1, self.positions, zero)


def _tiles(walk: TileWalk, ids: Tensor) -> Iterator[_Tile]:
    """Tiles with the vocabulary outside; a tile is good until the next."""
    inputs = walk.inputs
    no_target = torch.full((ids.size(0),), -1, dtype=torch.int64, device=ids.device)
    for start, end, block in walk.vocabulary_blocks():
        for first, last in walk.row_blocks():
            local = ids[first:last] - start
            inside = (local >= 0) & (local < end - start) & (ids[first:last] >= 0)
            yield _Tile(
                first,
                last,
                start,
                block,
                walk.logits(first, last, block),
                slice_or_none(inputs.bias, start, end),
                no_target[first:last],
                slice_or_none(inputs.temperature, first, last),
                local.clamp(0, end - start - 1),
                inside,
            )
