"""What batches, truncation and packing make of rows of given lengths. Numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lowpeak.packing import best_fit_decreasing

from ..packing import Strategy
from .measuring import Lengths

__all__ = [
    "PERCENTILES",
    "AtMaxLength",
    "Buckets",
    "Distribution",
    "Fill",
    "Summary",
    "length_grouped",
    "length_that_keeps",
    "padding_share",
    "summarise",
]

Truncation = Literal["keep_start", "keep_end"]
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
Integers = NDArray[np.integer]


@dataclass(frozen=True)
class Buckets:
    """A histogram: bucket ``i`` counts lengths of ``starts[i]`` up to below ``starts[i + 1]``."""

    starts: tuple[int, ...]
    """Powers of two after a 0 for the empty ones; one more than there are buckets."""
    sequences: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """Lengths of all sequences, in tokens."""

    sequences: int
    tokens: int
    empty: int
    """Sequences without a token."""
    shortest: int
    longest: int
    mean: float
    percentiles: dict[int, int]
    """The least length that so many percent of the sequences do not exceed."""
    buckets: Buckets


@dataclass(frozen=True)
class Fill:
    """What one strategy makes of the rows at one length, see ``lowpeak_trainers.packing``."""

    strategy: Strategy
    rows: int
    """Packed rows."""
    fill_ratio: float
    """Tokens in packed rows over the room there."""
    dropped_tokens: int
    split_rows: int
    """Rows in more than one piece."""
    split_tokens: int
    """Tokens in second and later pieces."""


@dataclass(frozen=True)
class AtMaxLength:
    """What one ``max_length`` costs."""

    max_length: int
    truncated: int
    """Sequences that are longer."""
    cut_tokens: int
    """Tokens past ``max_length``, of all sequences."""
    unlabelled: int
    """Rows in which truncation leaves no token with a loss; the trainers drop them."""
    padding_random: float
    """Share of padding in batches of rows in random order, over an epoch."""
    padding_grouped: float
    """The same where the Trainer groups rows of like lengths."""
    plain_positions: int
    """Tokens and padding of an epoch of batches in random order."""
    fills: tuple[Fill, ...]
    """One for each strategy; none for pairs, which no trainer packs."""

    def fill(self, strategy: Strategy) -> Fill:
        """The one of a strategy."""
        return next(fill for fill in self.fills if fill.strategy == strategy)


@dataclass(frozen=True)
class Summary:
    """All figures of ``lowpeak lengths``."""

    rows: int
    sequences_per_row: int
    batch_size: int
    truncation_mode: Truncation
    distribution: Distribution
    candidates: tuple[AtMaxLength, ...]
    """By ``max_length``, ascending."""
    length_for_99_percent: int
    """The least ``max_length`` that cuts at most 1 % of the tokens."""
    position_limit: int | None
    """The longest sequence that the model takes, where known."""


def summarise(
    lengths: Lengths,
    max_lengths: Sequence[int] = (),
    *,
    batch_size: int = 8,
    truncation_mode: Truncation = "keep_start",
    seed: int = 42,
    position_limit: int | None = None,
) -> Summary:
    """Work out the figures for each of ``max_lengths``.

    Without any they are powers of two, from the one that holds half of the sequences to the one
    that holds all, none above ``position_limit``. ``batch_size`` is that of one device. ``seed``
    orders the rows of plain batches. Raises ValueError where no sequence has a token.
    """
    ordered = np.sort(lengths.tokens)
    if not ordered.size or ordered[-1] == 0:
        raise ValueError("no row has a token")
    chosen = sorted(set(max_lengths)) or powers_of_two(ordered, position_limit)
    permutation = np.random.default_rng(seed).permutation(lengths.rows)
    candidates = tuple(
        _at(lengths, ordered, max_length, permutation, batch_size, truncation_mode)
        for max_length in chosen
    )
    return Summary(
        rows=lengths.rows,
        sequences_per_row=lengths.sequences_per_row,
        batch_size=batch_size,
        truncation_mode=truncation_mode,
        distribution=_distribution(ordered),
        candidates=candidates,
        length_for_99_percent=length_that_keeps(ordered, 0.99),
        position_limit=position_limit,
    )


def powers_of_two(ordered: Integers, position_limit: int | None) -> list[int]:
    """From the power that holds the median to the one that holds all; at least one."""
    median, longest = int(ordered[ordered.size // 2]), int(ordered[-1])
    first, last = (max(int(value) - 1, 0).bit_length() for value in (median, longest))
    powers = [2**exponent for exponent in range(first, last + 1)]
    if position_limit is None or powers[-1] <= position_limit:
        return powers
    return [power for power in powers if power < position_limit] + [position_limit]


def length_that_keeps(ordered: Integers, share: float) -> int:
    """The least maximum length that keeps this share of all tokens; ``ordered`` ascends."""
    total = int(ordered.sum(dtype=np.int64))
    kept = np.cumsum(ordered, dtype=np.int64)  # by the sequences up to each one
    longer = np.arange(ordered.size - 1, -1, -1)
    # Cut to the length of sequence i all longer ones count as long as it.
    enough = int(np.searchsorted(kept + longer * ordered.astype(np.int64), share * total))
    enough = min(enough, ordered.size - 1)
    below = int(kept[enough - 1]) if enough else 0
    return -(-(int(np.ceil(share * total)) - below) // (ordered.size - enough))


def _distribution(ordered: Integers) -> Distribution:
    tokens = int(ordered.sum(dtype=np.int64))
    values = np.percentile(ordered, PERCENTILES, method="inverted_cdf")
    starts = [0, *(2**exponent for exponent in range(int(ordered[-1]).bit_length() + 1))]
    bounds = np.searchsorted(ordered, starts)
    sums = np.concatenate(([0], np.cumsum(ordered, dtype=np.int64)))
    return Distribution(
        sequences=ordered.size,
        tokens=tokens,
        empty=int(np.searchsorted(ordered, 1)),
        shortest=int(ordered[0]),
        longest=int(ordered[-1]),
        mean=tokens / ordered.size,
        percentiles={q: int(value) for q, value in zip(PERCENTILES, values, strict=True)},
        buckets=Buckets(
            starts=tuple(starts),
            sequences=tuple(np.diff(bounds).tolist()),
            tokens=tuple(np.diff(sums[bounds]).tolist()),
        ),
    )


def _at(
    lengths: Lengths,
    ordered: Integers,
    max_length: int,
    permutation: Integers,
    batch_size: int,
    truncation_mode: Truncation,
) -> AtMaxLength:
    first_longer = int(np.searchsorted(ordered, max_length, side="right"))
    longer = ordered[first_longer:]
    kept = _trained_rows(lengths, max_length, truncation_mode)
    clipped = np.minimum(lengths.tokens, max_length).reshape(-1, lengths.sequences_per_row)
    order = permutation[kept[permutation]]
    share, positions = padding_share(clipped[order], batch_size)
    grouped = length_grouped(clipped[order].max(axis=1, initial=0), batch_size)
    return AtMaxLength(
        max_length=max_length,
        truncated=longer.size,
        cut_tokens=int(longer.sum(dtype=np.int64)) - max_length * longer.size,
        unlabelled=int(_trained_rows(lengths, None, truncation_mode).sum() - kept.sum()),
        padding_random=share,
        padding_grouped=padding_share(clipped[order[grouped]], batch_size)[0],
        plain_positions=positions,
        fills=() if lengths.sequences_per_row > 1 else _fills(lengths.tokens, max_length),
    )


def _trained_rows(
    lengths: Lengths, max_length: int | None, truncation_mode: Truncation
) -> NDArray[np.bool_]:
    """Which rows keep a token with a loss: bool [rows]."""
    tokens, prompts = lengths.tokens, lengths.prompts
    if max_length is not None and truncation_mode == "keep_start":
        tokens = np.minimum(tokens, max_length)
    trained = (tokens > prompts).reshape(-1, lengths.sequences_per_row)
    some: NDArray[np.bool_] = np.any(trained, axis=1)
    return some


def padding_share(lengths: Integers, batch_size: int) -> tuple[float, int]:
    """Share of padding, and all positions, of batches of consecutive rows.

    ``lengths``: integers [rows, sequences of a row]; a batch is padded to its longest sequence.
    """
    if not lengths.size:
        return 0.0, 0
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths.max(axis=1).astype(np.int64), starts)
    sizes = np.diff(starts, append=len(lengths)) * lengths.shape[1]
    positions = int((longest * sizes).sum())
    return 1 - int(lengths.sum(dtype=np.int64)) / positions, positions


def length_grouped(lengths: Integers, batch_size: int) -> Integers:
    """The order in which transformers' LengthGroupedSampler reads rows that were permuted before.

    Sorted from long to short within up to 50 batches, a quarter of the rows at most, and the
    longest row first of all. ``lengths``: integers [rows].
    """
    rows = lengths.size
    if not rows:
        return np.zeros(0, dtype=np.int64)
    size = batch_size * max(min(rows // (batch_size * 4), 50), 1)
    whole = rows // size * size
    inside = np.argsort(-lengths[:whole].reshape(-1, size), axis=1, kind="stable")
    rest = np.argsort(-lengths[whole:], kind="stable") + whole
    order = np.concatenate(((inside + np.arange(0, whole, size)[:, None]).ravel(), rest))
    firsts = order[::size]
    longest = int(np.argmax(lengths[firsts])) * size
    order[[0, longest]] = order[[longest, 0]]
    return order


def _fills(tokens: Integers, max_length: int) -> tuple[Fill, ...]:
    # As pack_lengths reports it, without its plan of every piece: a row or a piece of max_length
    # tokens fills a packed row, and best-fit decreasing, the longest first, puts nothing beside it.
    total = int(tokens.sum(dtype=np.int64))
    kept = np.minimum(tokens, max_length)
    cut = total - int(kept.sum(dtype=np.int64))
    longer = int(np.count_nonzero(tokens > max_length))
    rows = _bins(kept, max_length)
    bfd = Fill("bfd", rows, (total - cut) / (rows * max_length), cut, 0, 0)
    if cut:
        rows = _bins(tokens, max_length)
    split = Fill("bfd_split", rows, total / (rows * max_length), 0, longer, cut)
    return bfd, split, _wrapped(tokens, max_length)


def _bins(tokens: Integers, max_length: int) -> int:
    """How many rows of ``max_length`` best-fit decreasing fills with pieces of at most as much."""
    whole, rest = np.divmod(tokens, max_length)
    offsets = best_fit_decreasing(rest[rest > 0], max_length).offsets
    return int(whole.sum(dtype=np.int64)) + len(offsets) - 1


def _wrapped(tokens: Integers, max_length: int) -> Fill:
    ends = np.cumsum(tokens, dtype=np.int64)
    total = int(ends[-1])
    rows = -(-total // max_length)
    begins = ends - tokens
    first_piece = np.minimum(tokens, max_length - begins % max_length)
    later = tokens - first_piece
    return Fill(
        strategy="wrapped",
        rows=rows,
        fill_ratio=total / (rows * max_length),
        dropped_tokens=0,
        split_rows=int(np.count_nonzero(later)),
        split_tokens=int(later.sum(dtype=np.int64)),
    )
