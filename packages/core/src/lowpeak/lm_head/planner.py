"""How large the tiles of logits are: a function of shapes, dtypes and device type only.

The planner never looks at free memory, so that the same inputs take the same tiles and give bitwise
the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MiB = 1 << 20

_DEFAULT_SCRATCH = {"cpu": 16 * MiB}
_DEFAULT_SCRATCH_ACCELERATOR = 128 * MiB
# A product of this many columns keeps a matrix unit busy whatever the number of rows.
_PREFERRED_COLUMNS = 4096
_COLUMN_STEP = 128
_ROW_STEP = 16


@dataclass(frozen=True)
class TilePlan:
    """A tile of logits: `rows` tokens by `columns` vocabulary entries."""

    rows: int
    columns: int


@dataclass(frozen=True)
class TileCost:
    """Scratch bytes of a tile (casts and accumulators): per logit, vocabulary column and row."""

    per_logit: int
    per_column: int
    per_row: int

    def __add__(self, other: TileCost) -> TileCost:
        """The cost of two tiles of the same size."""
        return TileCost(
            self.per_logit + other.per_logit,
            self.per_column + other.per_column,
            self.per_row + other.per_row,
        )

    def of(self, plan: TilePlan) -> int:
        """Bytes of scratch that `plan` takes."""
        logits = plan.rows * plan.columns * self.per_logit
        return logits + plan.columns * self.per_column + plan.rows * self.per_row


NOTHING = TileCost(0, 0, 0)

_overrides: dict[str, TilePlan] = {}


@contextmanager
def override(
    plan_forward: TilePlan | None = None, plan_backward: TilePlan | None = None
) -> Iterator[None]:
    """Use these tiles instead of the planner's, in every thread, while the context is open.

    For measurements: `scratch_bytes` is not looked at.
    """
    before = dict(_overrides)
    for phase, plan in (("forward", plan_forward), ("backward", plan_backward)):
        if plan is not None:
            _overrides[phase] = plan
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def default_scratch_bytes(device_type: str) -> int:
    """Scratch bytes used where the caller names none."""
    return _DEFAULT_SCRATCH.get(device_type, _DEFAULT_SCRATCH_ACCELERATOR)


def plan_tiles(phase: str, rows: int, columns: int, cost: TileCost, scratch_bytes: int) -> TilePlan:
    """Tiles for `rows` tokens and a vocabulary of `columns` within `scratch_bytes`.

    All rows are kept together while a tile of `_PREFERRED_COLUMNS` columns fits, since then a block
    of the weight's gradient is one product; what is left goes into more columns.

    Raises:
        ValueError: when not even the smallest tile fits.
    """
    if phase in _overrides:
        forced = _overrides[phase]
        return TilePlan(min(forced.rows, rows), min(forced.columns, columns))
    smallest = TilePlan(min(rows, _ROW_STEP), min(columns, _COLUMN_STEP))
    if cost.of(smallest) > scratch_bytes:
        raise ValueError(
            f"scratch_bytes={scratch_bytes} cannot hold the smallest tile of logits "
            f"({smallest.rows} x {smallest.columns}): pass at least {cost.of(smallest)}"
        )
    width = min(columns, _PREFERRED_COLUMNS)
    left = scratch_bytes - width * cost.per_column
    height = max(min(rows, left // (width * cost.per_logit + cost.per_row)), smallest.rows)
    if height < rows:
        height = _even(rows, height, _ROW_STEP)
    left = scratch_bytes - height * cost.per_row
    width = left // (height * cost.per_logit + cost.per_column)
    return TilePlan(height, _even(columns, max(width, smallest.columns), _COLUMN_STEP))


def _even(total: int, most: int, step: int) -> int:
    """The size of nearly equal parts of `total`, each at most `most`, a multiple of `step`."""
    if most >= total:
        return total
    most = max(most // step * step, min(step, most))
    parts = -(-total // most)
    return min(-(-total // (parts * step)) * step, most)
