"""Which rows go through the model together, by their numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lowpeak.packing import best_fit_decreasing


class Group(NamedTuple):
    """Rows that go through the model together.

    Args:
        rows: their indices in the batch, ascending.
        counts: False where they run once more only because other processes have more groups.
    """

    rows: tuple[int, ...]
    counts: bool = True


def packed_groups(lengths: Sequence[int], budget: int) -> list[Group]:
    """Groups whose rows have at most `budget` tokens together, by best-fit decreasing.

    A row with more is a group of its own; those come first.
    """
    groups = [Group((row,)) for row, length in enumerate(lengths) if length > budget]
    short = [row for row, length in enumerate(lengths) if length <= budget]
    if short:
        items, offsets = best_fit_decreasing([max(1, lengths[row]) for row in short], budget)
        for begin, end in pairwise(offsets.tolist()):
            groups.append(Group(tuple(sorted(short[item] for item in items[begin:end]))))
    return groups


def padded_groups(widths: Sequence[int], budget: int) -> list[Group]:
    """Groups whose rows have at most `budget` tokens when padded to the widest of them."""
    groups: list[list[int]] = []
    for row in sorted(range(len(widths)), key=lambda row: -widths[row]):
        if groups and widths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [Group(tuple(sorted(rows))) for rows in groups]


def as_many(groups: list[Group], count: int) -> list[Group]:
    """`count` groups, or more where there are more: the largest halved, then one repeated."""
    groups = list(groups)
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda index: len(groups[index].rows))
        rows = groups[largest].rows
        if len(rows) > 1:
            half = len(rows) // 2
            groups[largest : largest + 1] = [Group(rows[:half]), Group(rows[half:])]
        else:
            groups.append(Group(rows, counts=False))
    return groups
