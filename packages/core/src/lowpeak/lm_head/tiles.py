"""Walk the [N, V] logits in tiles: the dtypes, buffers and kernels that both passes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.hopper_products import products_serve
from ..kernels.logit_transform import TileTransform
from .gemm import has_wide_output, product_into
from .low_rank_inputs import LowRankFactors, join_into, joined, joined_width
from .planner import TileCost, TilePlan, default_scratch_bytes, plan_tiles
from .rows import gathered

HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadInputs:
    """A head's inputs after the checks, and the dtype of the products.

    hidden [N, H], weight [V, H], bias [V], temperature [N] in the statistics' dtype in place of the
    transform's own. `wide_tiles`: float32 logits from half-precision products. `low`: an addition
    to the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: Tensor | None
    transform: TileTransform
    compute_dtype: torch.dtype
    wide_tiles: bool = False
    low: LowRankFactors | None = None

    def selected(self, rows: Tensor | None) -> HeadInputs:
        """The inputs cut down to `rows` (None: all), with the strides that the kernels read."""
        temperature = self.temperature
        if temperature is not None:
            temperature = gathered(temperature, rows).contiguous()
        return replace(
            self,
            hidden=gathered(self.hidden, rows),
            bias=None if self.bias is None else self.bias.contiguous(),
            temperature=temperature,
            low=None if self.low is None else self.low.selected(rows),
        )

    def rows(self, start: int, end: int) -> HeadInputs:
        """The inputs of rows [start, end), as views."""
        temperature = slice_or_none(self.temperature, start, end)
        low = None if self.low is None else self.low.rows(start, end)
        return replace(self, hidden=self.hidden[start:end], temperature=temperature, low=low)

    def product_hidden(self) -> Tensor:
        """What is multiplied with each block of `product_block`: [N, H], or more with `low`."""
        if self.low is None:
            return self.hidden.to(self.compute_dtype)
        return joined(self.hidden, self.low.hidden, self.compute_dtype)

    def product_block(self, start: int, end: int, room: Tensor | None) -> Tensor:
        """The weight of the vocabulary [start, end) in the compute dtype, with that of `low`.

        It is made in `room`, from `product_room`, where it is no part of the weight itself.
        """
        block = self.weight[start:end]
        if room is None:
            return block
        if self.low is None:
            return room[: block.size(0)].copy_(block)
        return join_into(room, block, self.low.weight[start:end])

    def product_room(self, columns: int) -> Tensor | None:
        """Room for a block of so many columns, None where a block is a part of the weight."""
        if not self.block_bytes:
            return None
        width = self.weight.size(1)
        shape = (columns, joined_width(width, self.low))
        room = torch.empty(shape, dtype=self.compute_dtype, device=self.weight.device)
        room[:, width:].zero_()
        return room

    @property
    def block_bytes(self) -> int:
        """Bytes that a vocabulary entry takes in `product_room`."""
        if self.low is None and self.weight.dtype == self.compute_dtype:
            return 0
        return joined_width(self.weight.size(1), self.low) * self.compute_dtype.itemsize

    @property
    def statistics_dtype(self) -> torch.dtype:
        """float64 for float64 products, float32 otherwise."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def tile_dtype(self) -> torch.dtype:
        """The dtype logits are rounded to: float16 would overflow above 65504, so float32 there."""
        wide = self.wide_tiles or self.compute_dtype == torch.float16
        return self.statistics_dtype if wide else self.compute_dtype

    @property
    def slope(self) -> float | Tensor:
        """The largest d z / d raw logit, a number or [N]."""
        divisor = self.transform.temperature if self.temperature is None else self.temperature
        return self.transform.scale / divisor


def use_triton(backend: str, inputs: HeadInputs) -> bool:
    """Whether the Triton kernels serve; "auto" takes them on GPUs, but for float64.

    Raises:
        ValueError: for backend="triton" where Triton is missing or the products are float64.
    """
    if backend == "torch":
        return False
    from ..kernels.triton_shim import TRITON_AVAILABLE

    serves = TRITON_AVAILABLE and inputs.compute_dtype != torch.float64
    if backend == "auto":
        return serves and inputs.hidden.device.type in ("cuda", "xpu")
    if not serves:
        raise ValueError(
            f"backend='triton' cannot serve {inputs.compute_dtype} products "
            f"(Triton installed: {TRITON_AVAILABLE}): pass backend='auto' or 'torch'"
        )
    return True


def use_products(backend: str, inputs: HeadInputs) -> bool:
    """Whether the products with the softmax in their epilogue serve."""
    return use_triton(backend, inputs) and epilogues_serve(inputs)


def epilogues_serve(inputs: HeadInputs) -> bool:
    """Whether the products' epilogues know the transform, and Hopper's kernels can read the rest.

    The tanh of a soft cap would cost an epilogue six times the product.
    """
    if inputs.transform.softcap or inputs.transform.scale <= 0.0:
        return False
    if inputs.low is not None:  # what is multiplied is put together beforehand
        shape = (0, joined_width(inputs.weight.size(1), inputs.low))
        return products_serve(inputs.hidden.new_empty(shape, dtype=inputs.compute_dtype))
    return half_products_serve(inputs)


def half_products_serve(inputs: HeadInputs) -> bool:
    """Whether Hopper's kernels can read hidden and weight, once they are in the compute dtype."""
    hidden, weight = (
        x if x.dtype == inputs.compute_dtype else x[:0].to(inputs.compute_dtype)
        for x in (inputs.hidden, inputs.weight)
    )
    return products_serve(hidden, weight)


def tile_cost(inputs: HeadInputs, triton: bool, backward: bool, weight_block: bool) -> TileCost:
    """Scratch bytes per logit, column and row of one pass.

    `weight_block`: whether a block of the weight's gradient is accumulated outside the result.
    """
    compute, statistics = inputs.compute_dtype.itemsize, inputs.statistics_dtype.itemsize
    width = joined_width(inputs.weight.size(1), inputs.low)
    per_logit = inputs.tile_dtype.itemsize
    if backward and inputs.tile_dtype != inputs.compute_dtype:
        per_logit += compute
    if not triton:
        # temporaries of the torch twins: at most five of the statistics' dtype and two masks
        per_logit += 5 * statistics + 2
    per_column = inputs.block_bytes
    per_column += statistics * inputs.weight.size(1) if weight_block else 0
    per_row = 0
    half = inputs.compute_dtype in HALF_DTYPES
    if half and not has_wide_output(inputs.hidden.device, inputs.compute_dtype):
        per_column += statistics * width
        per_row += statistics * width
    return TileCost(per_logit, per_column, per_row)


def head_plan(
    inputs: HeadInputs, phase: str, cost: TileCost, scratch_bytes: int | None
) -> TilePlan:
    """The tiles of one pass over all logits of a head."""
    if scratch_bytes is None:
        scratch_bytes = default_scratch_bytes(inputs.hidden.device.type)
    return plan_tiles(phase, inputs.hidden.size(0), inputs.weight.size(0), cost, scratch_bytes)


class TileWalk:
    """Tiles of raw logits in one reused buffer, vocabulary blocks outside, row blocks inside."""

    def __init__(self, inputs: HeadInputs, plan: TilePlan, *, products: bool = False) -> None:
        """`products`: the buffer is for gradients, since no logit leaves its product."""
        self.inputs = self.blocks_of = inputs
        self.plan = plan
        # logits [k, V] of the first rows that need no product
        self.kept: Tensor | None = None
        self._column = 0
        self.hidden = inputs.product_hidden()
        self._pitch = -(-self.plan.columns // 8) * 8  # aligned rows, whatever the vocabulary's size
        self._buffer = self.new_buffer(inputs.compute_dtype if products else inputs.tile_dtype)

    def new_buffer(self, dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer for one tile."""
        size = self.plan.rows * self._pitch
        return torch.empty(size, dtype=dtype, device=self.inputs.hidden.device)

    def tile(self, buffer: Tensor, rows: int, columns: int) -> Tensor:
        """A [rows, columns] view of `buffer` with aligned rows."""
        return buffer.as_strided((rows, columns), (self._pitch, 1))

    def gradient_buffer(self) -> Tensor | None:
        """A buffer for the gradient of a tile; None where it overwrites the logits."""
        dtype = self.inputs.compute_dtype
        return None if dtype == self.inputs.tile_dtype else self.new_buffer(dtype)

    def gradient_tile(self, buffer: Tensor | None, logits: Tensor) -> Tensor:
        """Where the gradient of `logits` goes."""
        return logits if buffer is None else self.tile(buffer, *logits.shape)

    def vocabulary_blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, weight[start:end] in the compute dtype); a block is good until the next."""
        total = self.inputs.weight.size(0)
        # one buffer: two blocks would be alive while the next is made
        room = self.blocks_of.product_room(self.plan.columns)
        for start in range(0, total, self.plan.columns):
            end = min(start + self.plan.columns, total)
            self._column = start
            yield start, end, self.blocks_of.product_block(start, end, room)

    def parts(self, block: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, factor) of what a block's logits are made of, one product each."""
        yield 0, block.size(0), block

    def room(self, start: int, end: int, block: Tensor) -> Tensor:
        """Where a product's epilogue puts what it makes of the logits of rows [start, end)."""
        return self.tile(self._buffer, end - start, block.size(0))

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each block of rows."""
        total = self.hidden.size(0)
        for start in range(0, total, self.plan.rows):
            yield start, min(start + self.plan.rows, total)

    def logits(self, start: int, end: int, block: Tensor) -> Tensor:
        """Raw logits of rows [start, end) and the vocabulary of `block`, without bias."""
        tile = self.tile(self._buffer, end - start, block.size(0))
        ready = 0
        if self.kept is not None:
            rows = self.kept[start:end, self._column : self._column + block.size(0)]
            ready = rows.size(0)
            tile[:ready].copy_(rows)
        if start + ready < end:
            hidden = self.hidden[start + ready : end]
            for first, last, part in self.parts(block):
                product_into(tile[ready:, first:last], hidden, part.t())
        return tile


def slice_or_none(x: Tensor | None, start: int, end: int) -> Tensor | None:
    """x[start:end], or None for None."""
    return None if x is None else x[start:end]
