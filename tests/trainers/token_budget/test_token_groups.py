"""Which rows go through the model together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowpeak_trainers.prompt_sharing import choose_prefixes, facts_of, prefix_facts
from lowpeak_trainers.token_budget.groups import (
    Group,
    as_many,
    packed_groups,
    padded_groups,
    shared_groups,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=24)


def rows_of(groups):
    return sorted(row for group in groups if group.counts for row in group.rows)


@given(LENGTHS, st.integers(1, 60))
def test_packed(lengths, budget):
    groups = packed_groups(lengths, budget)
    assert rows_of(groups) == list(range(len(lengths)))
    for group in groups:
        assert list(group.rows) == sorted(group.rows)
        assert len(group.rows) == 1 or sum(lengths[row] for row in group.rows) <= budget


def test_packed_by_best_fit():
    assert packed_groups([5, 9, 4, 1, 12, 6], 10) == [
        Group((4,)),
        Group((1, 3)),
        Group((2, 5)),
        Group((0,)),
    ]


@given(LENGTHS, st.integers(1, 60))
def test_padded(widths, budget):
    groups = padded_groups(widths, budget)
    assert rows_of(groups) == list(range(len(widths)))
    for group in groups:
        size = len(group.rows) * max(widths[row] for row in group.rows)
        assert len(group.rows) == 1 or size <= budget


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(20, 200))
def test_shared_prompts_count_once(seed, rows, budget):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, count=()):
        return torch.randint(low, high, count, generator=generator)

    prompts = draw(0, 3, (3, 40))
    ids = torch.zeros(rows, 64, dtype=torch.long)
    lengths, labelled = [], torch.zeros(rows, 63, dtype=torch.bool)
    for row in range(rows):
        prompt, begin = prompts[draw(0, 3)], int(draw(8, 40))
        length = begin + int(draw(1, 24))
        ids[row, :begin], ids[row, begin:length] = prompt[:begin], draw(0, 3, (length - begin,))
        labelled[row, begin - 1 : length - 1] = True
        lengths.append(length)
    real = torch.arange(64) < torch.tensor(lengths).unsqueeze(1)
    facts = prefix_facts(ids, real, labelled).tolist()
    groups = shared_groups(lengths, facts, budget)
    assert rows_of(groups) == list(range(rows))
    for group in groups:
        some = [lengths[row] for row in group.rows]
        shared = choose_prefixes(some, facts_of(group.rows, facts, rows))
        cost = sum(some) - sum(prefix.tokens for prefix in shared)
        assert len(group.rows) == 1 or cost <= budget


def test_rows_of_one_prompt_stay_together():
    """Eight completions of 10 tokens to one of two prompts of 100: four and four fill 150."""
    prompts = torch.arange(200).view(2, 100)
    ids = torch.cat([prompts.repeat_interleave(8, 0), torch.arange(160).view(16, 10) + 200], 1)
    ids = ids[torch.arange(16).view(2, 8).T.flatten()]  # in turn
    labelled = torch.arange(109).expand(16, -1) >= 99
    facts = prefix_facts(ids, torch.ones_like(ids, dtype=torch.bool), labelled).tolist()
    groups = shared_groups([110] * 16, facts, 152)
    # 110, and 11 more for each further row: the last token of the prompt predicts the first scored
    assert sorted(len(group.rows) for group in groups) == [4, 4, 4, 4]
    for group in groups:
        assert len({row % 2 for row in group.rows}) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_as_many_groups_as_other_processes(count):
    groups = [Group((0, 3, 4)), Group((1, 2))]
    found = as_many(groups, count)
    assert len(found) == max(count, 2)
    assert rows_of(found) == [0, 1, 2, 3, 4]
    assert all(group.counts for group in found) == (count <= 5)
