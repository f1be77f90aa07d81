"""How large the tiles of logits are: a function of shapes, dtypes and device type only.

The planner never looks at free memory, so that the same inputs take the same tiles and give bitwise
the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..kernels.lm_head_fold_product import SPAN_COLUMNS

MiB = 1 << 20

# A product of this many columns keeps a matrix unit busy whatever the number of rows.
_PREFERRED_COLUMNS = 4096
_COLUMN_STEP = 128
_ROW_STEP = 16
_CHUNK_STEP = 128


@dataclass(frozen=True)
class Budgets:
    """Scratch bytes where the caller names none, and the fewest rows of a chunk worth its pass.

    `tiles` serves each of two passes. A single pass takes chunks of rows with all of the
    vocabulary: `expected_chunk` and `expected_rows` where each is added to a gradient of the weight
    or of an adapter's factor, as expected, `frozen_chunk` and `frozen_rows` where none is.
    """

    measured_on: str
    tiles: int
    frozen_chunk: int
    frozen_rows: int
    expected_chunk: int
    expected_rows: int

    def chunk(self, accumulates: bool) -> tuple[int, int]:
        """(bytes, fewest rows) of a single pass; see `Keep.accumulates`."""
        if accumulates:
            return self.expected_chunk, self.expected_rows
        return self.frozen_chunk, self.frozen_rows


# NVIDIA H200, bf16, V = 262144, H = 1152, N = 8192, one pass against two: frozen 20.5 ms in chunks
# of 256 rows, 18.9 of 512, 17.9 of 1024, 26.5 in two passes; with expected gradients 49.4, 34.7,
# 29.2, 26.7 ms in chunks of 256, 512, 1024, 2048 rows, 33 in two passes.
_BUDGETS = {
    "cpu": Budgets("x86-64, 2 cores", 16 * MiB, 16 * MiB, 16, 16 * MiB, 16),
}
_ACCELERATOR = Budgets("NVIDIA H200", 128 * MiB, 280 * MiB, 128, 1024 * MiB, 512)


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
    plan_forward: TilePlan | None = None,
    plan_backward: TilePlan | None = None,
    plan_frozen: TilePlan | None = None,
    plan_expected: TilePlan | None = None,
) -> Iterator[None]:
    """Use these tiles instead of the planner's, in every thread, while the context is open.

    For measurements: `scratch_bytes` is not looked at. Of the chunks of a single pass, frozen or
    expected, the columns are always all.
    """
    before = dict(_overrides)
    plans = {
        "forward": plan_forward,
        "backward": plan_backward,
        "frozen": plan_frozen,
        "expected": plan_expected,
    }
    for phase, plan in plans.items():
        if plan is not None:
            _overrides[phase] = plan
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def budgets(device_type: str) -> Budgets:
    """The defaults of a device type."""
    return _BUDGETS.get(device_type, _ACCELERATOR)


def default_scratch_bytes(device_type: str) -> int:
    """Scratch bytes of each of two passes where the caller names none."""
    return budgets(device_type).tiles


def chunk_fits(
    phase: str,
    accumulates: bool,
    columns: int,
    cost: TileCost,
    device_type: str,
    scratch_bytes: int | None,
) -> bool:
    """Whether a single pass over all `columns` finds room for chunks large enough to pay.

    `accumulates`: see `Keep`. The number of rows does not matter, so that compiled graphs need not
    either.
    """
    if phase in _overrides:
        return True
    budget, fewest = budgets(device_type).chunk(accumulates)
    return cost.of(TilePlan(fewest, columns)) <= (
        budget if scratch_bytes is None else scratch_bytes
    )


def plan_chunk(
    phase: str,
    accumulates: bool,
    rows: int,
    columns: int,
    cost: TileCost,
    device_type: str,
    scratch_bytes: int | None,
) -> TilePlan:
    """A chunk of a single pass over `rows` tokens, for which `chunk_fits`; rows in even parts."""
    if phase in _overrides:
        return TilePlan(min(_overrides[phase].rows, rows), columns)
    budget, _ = budgets(device_type).chunk(accumulates)
    left = (budget if scratch_bytes is None else scratch_bytes) - columns * cost.per_column
    most = left // (columns * cost.per_logit + cost.per_row)
    assert most > 0
    fine = _even(rows, most, _ROW_STEP)
    coarse = _even(rows, most, _CHUNK_STEP) if most >= _CHUNK_STEP else fine
    # a chunk more costs more than blocks of rows that are not full
    fewer = -(-rows // max(fine, 1)) < -(-rows // max(coarse, 1))
    return TilePlan(fine if fewer else coarse, columns)


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


def plan_products(
    rows: int,
    columns: int,
    cast: int,
    partial: int,
    device_type: str,
    scratch_bytes: int | None,
) -> TilePlan | None:
    """Rows and columns that one product with a softmax epilogue takes; None where none fits.

    All columns where they need no cast of `cast` bytes each; else they are cut where partial sums
    are, which take `partial` bytes a row, so that the same sums are made whatever the cut.
    """
    scratch = default_scratch_bytes(device_type) if scratch_bytes is None else scratch_bytes
    width = columns
    if cast:
        width = min(columns, scratch // (2 * cast) // SPAN_COLUMNS * SPAN_COLUMNS)
        scratch -= width * cast
    height = scratch // (partial * max(-(-width // SPAN_COLUMNS), 1))
    if not width or height < min(rows, _ROW_STEP):
        return None
    return TilePlan(_even(rows, height, _ROW_STEP), width)


def _even(total: int, most: int, step: int) -> int:
    """The size of nearly equal parts of `total`, each at most `most`, a multiple of `step`."""
    if most >= total:
        return total
    most = max(most // step * step, min(step, most))
    parts = -(-total // most)
    return min(-(-total // (parts * step)) * step, most)
