"""Which tokens of which rows share a packed row, from the lengths of the rows alone."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowpeak.packing import best_fit_decreasing

__all__ = ["STRATEGIES", "PackingPlan", "PackingReport", "Strategy", "pack_lengths"]

Integers = NDArray[np.int64]
Strategy = Literal["bfd", "bfd_split", "wrapped"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class PackingReport:
    """What packing made of the rows it was given; all counts are of rows or of tokens."""

    strategy: Strategy
    capacity: int
    source_rows: int
    source_tokens: int
    empty_rows: int
    """Source rows without a token; they are left out."""
    truncated_rows: int
    """Source rows that lost their tokens past the capacity (`bfd`)."""
    dropped_tokens: int
    """Tokens that no packed row holds."""
    split_rows: int
    """Source rows in more than one piece (`bfd_split`, `wrapped`)."""
    split_tokens: int
    """Tokens in the second and later pieces of their rows: they no longer see the first."""
    rows: int
    """Packed rows."""

    @property
    def tokens(self) -> int:
        """Tokens in packed rows."""
        return self.source_tokens - self.dropped_tokens

    @property
    def fill_ratio(self) -> float:
        """Tokens in packed rows over the room there; 1.0 where there are no rows."""
        return self.tokens / (self.rows * self.capacity) if self.rows else 1.0

    def __str__(self) -> str:
        return (
            f"{self.strategy}: {self.source_rows} rows of {self.source_tokens} tokens in "
            f"{self.rows} packed rows of {self.capacity}, {100 * self.fill_ratio:.2f}% full; "
            f"{self.truncated_rows} rows truncated ({self.dropped_tokens} tokens dropped), "
            f"{self.split_rows} split ({self.split_tokens} tokens split off), "
            f"{self.empty_rows} empty"
        )


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Packed row ``r`` is the pieces ``offsets[r]`` up to ``offsets[r + 1]``, one after another."""

    rows: Integers
    """The source row of each piece: int64 [P]."""
    starts: Integers
    """Its first token in that row: int64 [P]."""
    lengths: Integers
    """How many tokens it has, at least one: int64 [P]."""
    offsets: Integers
    """Where each packed row begins among the pieces, and P at the end: int64 [R + 1]."""
    report: PackingReport


def pack_lengths(lengths: ArrayLike, capacity: int, strategy: Strategy = "bfd") -> PackingPlan:
    """Packs rows of the given lengths into rows of at most ``capacity`` tokens, all at once.

    ``bfd`` keeps the first ``capacity`` tokens of a row and packs by best-fit decreasing;
    ``bfd_split`` first cuts longer rows into pieces of ``capacity`` tokens, so that it equals
    ``bfd`` where no row is longer; ``wrapped`` joins all rows and cuts every ``capacity`` tokens,
    across the rows. The strategies are those of TRL 1.16, and so are the order of rows and pieces
    where TRL sees them in one batch.

    ``lengths``: integers [rows], 0 for an empty row. Raises ValueError for a negative length, a
    capacity below 1 or an unknown strategy, TypeError for lengths that are no integers.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths must have one dimension, not {array.ndim}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"lengths must be integers, not {array.dtype}")
    array = array.astype(np.int64)
    if array.size and array.min() < 0:
        raise ValueError(f"lengths must not be negative, but one is {array.min()}")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    match strategy:
        case "bfd":
            pieces = _truncated(array, capacity)
        case "bfd_split":
            pieces = _split(array, capacity)
        case "wrapped":
            return _wrapped(array, capacity)
        case _:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    packing = best_fit_decreasing(pieces[2], capacity)
    rows, starts, kept = (column[packing.items] for column in pieces)
    report = _report(strategy, capacity, array, pieces, len(packing.offsets) - 1)
    return PackingPlan(rows, starts, kept, packing.offsets, report)


Pieces = tuple[Integers, Integers, Integers]


def _truncated(lengths: Integers, capacity: int) -> Pieces:
    rows = np.flatnonzero(lengths).astype(np.int64)
    return rows, np.zeros_like(rows), np.minimum(lengths[rows], capacity)


def _split(lengths: Integers, capacity: int) -> Pieces:
    counts = -(-lengths // capacity)
    rows = np.repeat(np.arange(lengths.size), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(rows.size) - first) * capacity
    return rows, starts, np.minimum(lengths[rows] - starts, capacity)


def _wrapped(lengths: Integers, capacity: int) -> PackingPlan:
    total = int(lengths.sum())
    sources = np.flatnonzero(lengths).astype(np.int64)
    begins = (np.cumsum(lengths) - lengths)[sources]
    cuts = np.arange(0, total, capacity)
    positions = np.union1d(begins, cuts)  # in the joined rows, where a piece begins
    owner = np.searchsorted(begins, positions, side="right") - 1
    pieces = sources[owner], positions - begins[owner], np.diff(positions, append=total)
    offsets = np.append(np.searchsorted(positions, cuts), positions.size).astype(np.int64)
    report = _report("wrapped", capacity, lengths, pieces, cuts.size)
    return PackingPlan(*pieces, offsets, report)


def _report(
    strategy: Strategy, capacity: int, lengths: Integers, pieces: Pieces, packed_rows: int
) -> PackingReport:
    rows, starts, kept = pieces
    later = starts > 0
    truncated = lengths > capacity if strategy == "bfd" else np.zeros(0, dtype=bool)
    return PackingReport(
        strategy=strategy,
        capacity=capacity,
        source_rows=lengths.size,
        source_tokens=int(lengths.sum()),
        empty_rows=int((lengths == 0).sum()),
        truncated_rows=int(truncated.sum()),
        dropped_tokens=int(lengths.sum() - kept.sum()),
        split_rows=np.unique(rows[later]).size,
        split_tokens=int(kept[later].sum()),
        rows=packed_rows,
    )
