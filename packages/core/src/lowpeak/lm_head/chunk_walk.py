"""Walk the chunks of rows of a single pass, whose tiles hold all of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..kernels.lm_head_exponentials import Exponentials
from ..kernels.lm_head_fold import Folded, RowStatistics
from ..kernels.lm_head_fold_product import SPAN_COLUMNS, fold_product_triton
from .low_rank_inputs import LowRankFactors, join_into, joined_width
from .planner import TilePlan
from .tiles import HeadInputs, TileWalk, slice_or_none


class ChunkWalk(TileWalk):
    """A walk with one block, the whole weight, which no low-rank addition is put together with.

    That is done for a part of the vocabulary at a time, anew for each chunk, so that logits are
    rounded once and there is no second weight.
    """

    def __init__(self, inputs: HeadInputs, plan: TilePlan) -> None:
        super().__init__(inputs, plan)
        self._width = inputs.weight.size(1)
        # the addition's factors in the compute dtype
        self.low: LowRankFactors | None = None
        self._room: Tensor | None = None
        if inputs.low is not None:
            self.low = inputs.low.to(inputs.compute_dtype)
            self._room = inputs.product_room(join_columns(inputs))
            self.blocks_of = replace(inputs, low=None)

    def parts(self, block: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(start, end, what is multiplied with the walk's hidden) of parts of the vocabulary."""
        if self.low is None or self._room is None:
            yield 0, block.size(0), block
            return
        for start in range(0, block.size(0), self._room.size(0)):
            end = min(start + self._room.size(0), block.size(0))
            yield start, end, join_into(self._room, block[start:end], self.low.weight[start:end])

    def fold_products(
        self,
        rows: tuple[int, int],
        weight: Tensor,
        targets: Tensor,
        sums: RowStatistics,
        folded: Folded,
        kept: Tensor | Exponentials,
    ) -> None:
        """Fold the logits of rows [first, last) while they are made, and keep them or their
        exponentials in `kept`. `weight` is the block; `targets` and `sums` are of these rows."""
        inputs = self.inputs.rows(*rows)
        hidden = self.hidden[rows[0] : rows[1]]
        for start, end, part in self.parts(weight):
            bias = slice_or_none(inputs.bias, start, end)
            room = (
                {"logits": kept[:, start:end]}
                if isinstance(kept, Tensor)
                else {"exponentials": kept.part(start, end, SPAN_COLUMNS)}
            )
            options = (targets, inputs.temperature, sums, start, inputs.transform, folded)
            fold_product_triton(hidden, part, bias, *options, **room)

    def own_hidden(self, start: int, end: int) -> Tensor:
        """Rows [start, end) of the head's hidden, [n, H], without an addition's columns."""
        rows = self.hidden[start:end]
        return rows if self.low is None else rows[:, : self._width]


def join_columns(inputs: HeadInputs) -> int:
    """Vocabulary entries that are put together at a time.

    A multiple of what a program of Hopper's kernels folds, and enough for all of them.
    """
    most = 1024 if inputs.hidden.device.type == "cpu" else 16384
    return min(inputs.weight.size(0), most)


def join_bytes(inputs: HeadInputs) -> int:
    """Scratch for them and for the addition's factor in the compute dtype; 0 without one."""
    if inputs.low is None:
        return 0
    size = inputs.compute_dtype.itemsize
    room = join_columns(inputs) * joined_width(inputs.weight.size(1), inputs.low) * size
    narrow = inputs.low.weight.dtype != inputs.compute_dtype
    return room + (inputs.weight.size(0) * inputs.low.rank * size if narrow else 0)
