"""Which rows go through the model together, by their numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lowpeak.packing import best_fit_decreasing

from ..prompt_sharing import choose_prefixes, facts_of, longest_prefix


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


def shared_groups(lengths: list[int], facts: list[int], budget: int) -> list[Group]:
    """As `packed_groups` where rows that begin alike share tokens, which count once in a group.

    Rows that share are kept together as far as the budget allows.

    Args:
        lengths: real tokens of each row.
        facts: what `prompt_sharing.prefix_facts` found of the batch.
        budget: most tokens to be computed for a group of more than one row.
    """
    clusters, costs = _clusters(lengths, facts, budget)
    groups = [
        Group(tuple(rows)) for rows, cost in zip(clusters, costs, strict=True) if cost > budget
    ]
    short = [index for index, cost in enumerate(costs) if cost <= budget]
    packed = packed_groups([costs[index] for index in short], budget)
    for group in packed:
        rows = sorted(row for item in group.rows for row in clusters[short[item]])
        groups += _within(rows, lengths, facts, budget)
    return groups


def _clusters(
    lengths: list[int], facts: list[int], budget: int
) -> tuple[list[list[int]], list[int]]:
    """Rows that share tokens, within the budget, and how many tokens each cluster computes."""
    clusters: list[list[int]] = []
    costs: list[int] = []
    latest: list[int] = []  # of each row, the last cluster of those that it begins like
    for row, prefix in enumerate(choose_prefixes(lengths, facts)):
        index, own = len(clusters), lengths[row]
        if prefix.tokens:
            joined = latest[prefix.owner]
            taken = longest_prefix(row, clusters[joined], lengths, facts)
            if costs[joined] + own - taken.tokens <= budget:
                index, own = joined, own - taken.tokens
        if index == len(clusters):
            clusters.append([])
            costs.append(0)
        clusters[index].append(row)
        costs[index] += own
        latest.append(index)
        if prefix.tokens:
            latest[prefix.owner] = index
    return clusters, costs


def _within(rows: list[int], lengths: list[int], facts: list[int], budget: int) -> list[Group]:
    """The rows as one group, or halved where they share too little for it to be used."""
    some = [lengths[row] for row in rows]
    prefixes = choose_prefixes(some, facts_of(rows, facts, len(lengths)))
    if len(rows) == 1 or sum(some) - sum(prefix.tokens for prefix in prefixes) <= budget:
        return [Group(tuple(rows))]
    half = len(rows) // 2
    return [
        group
        for part in (rows[:half], rows[half:])
        for group in _within(part, lengths, facts, budget)
    ]


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
    """`count` groups, or more where there are more: the largest halved, then one repeated first."""
    groups = list(groups)
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda index: len(groups[index].rows))
        rows = groups[largest].rows
        if len(rows) > 1:
            half = len(rows) // 2
            groups[largest : largest + 1] = [Group(rows[:half]), Group(rows[half:])]
        else:
            groups.insert(0, Group(rows, counts=False))
    return groups
