"""Best-fit decreasing bin packing: native where the extension was built, in Python elsewhere."""

from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .native import native_available

__all__ = ["Packing", "best_fit_decreasing"]

Integers = NDArray[np.int64]


class Packing(NamedTuple):
    """Which items share a bin: bin ``b`` holds ``items[offsets[b]:offsets[b + 1]]``."""

    items: Integers
    """Indices of the items, bin after bin: int64 [N]."""
    offsets: Integers
    """Where each bin begins in ``items``, and N at the end: int64 [bins + 1]."""


def best_fit_decreasing(lengths: ArrayLike, capacity: int) -> Packing:
    """Packs items into bins of one capacity, over all items at once.

    The longest item goes first, equal lengths in their own order; each goes to the bin with the
    least space that takes it, and among equal spaces to the bin that has had it for longest. Bins
    are numbered as they are opened. So packs TRL 1.16, within 1000 rows. The result depends on
    nothing but the arguments, with or without the native extension.

    ``lengths``: integers [N], each in 1..``capacity``. Memory is a few times the lengths, and a
    table of ``min(capacity, sum(lengths))`` entries. Raises ValueError for a length or a capacity
    out of range, TypeError for lengths that are no integers. Best-fit decreasing for documents:
    Ding et al., "Fewer Truncations Improve Language Modeling", 2024.
    """
    array = _as_integers(lengths)
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    if array.size and not 1 <= array.min() <= array.max() <= capacity:
        worst = array.min() if array.min() < 1 else array.max()
        raise ValueError(
            f"lengths must lie in 1..{capacity}, the capacity, but one is {worst}: "
            "drop empty items, cut or split long ones"
        )
    if native_available():
        from lowpeak import _native

        return Packing(*_native.best_fit_decreasing(array, capacity))
    return _in_python(array, capacity)


def _as_integers(lengths: ArrayLike) -> Integers:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths must have one dimension, not {array.ndim}")
    # numpy takes an empty list for floats.
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"lengths must be integers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _in_python(lengths: Integers, capacity: int) -> Packing:
    order = np.argsort(-lengths, kind="stable")
    spaces: list[int] = []  # of the open bins, each once, ascending
    waiting: dict[int, deque[int]] = {}  # the open bins of each space, first in, first out
    bins: list[int] = []
    bin_count = 0
    for length in lengths[order].tolist():
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, chosen = capacity, bin_count
            bin_count += 1
        else:
            space = spaces[place]
            chosen = waiting[space].popleft()
            if not waiting[space]:
                del spaces[place]
        bins.append(chosen)
        if space > length:
            queue = waiting.setdefault(space - length, deque())
            if not queue:
                insort(spaces, space - length)
            queue.append(chosen)
    bin_of = np.array(bins, dtype=np.int64)
    items = order[np.argsort(bin_of, kind="stable")]
    sizes = np.bincount(bin_of, minlength=bin_count)
    return Packing(items.astype(np.int64), np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))
