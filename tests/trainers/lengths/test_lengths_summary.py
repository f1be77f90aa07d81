"""The figures, against counting one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.trainer_pt_utils import get_length_grouped_indices

from lowpeak_trainers.lengths import Lengths, summarise
from lowpeak_trainers.lengths.summary import length_grouped, length_that_keeps, padding_share
from lowpeak_trainers.packing import STRATEGIES, pack_lengths

MAX_LENGTHS = (1, 7, 16, 40, 64)


def lengths_of(tokens: list[int] | NDArray[np.integer], prompts=None, pairs=False) -> Lengths:
    array = np.asarray(tokens, dtype=np.int32)
    prompts = np.zeros_like(array) if prompts is None else np.asarray(prompts, dtype=np.int32)
    form = "preference" if pairs else "text"
    return Lengths(array, prompts, form, False, 2 if pairs else 1, False)


def drawn(count: int, longest: int = 50, seed: int = 0) -> NDArray[np.integer]:
    return np.random.default_rng(seed).integers(0, longest + 1, count)


def test_distribution_counts_every_row() -> None:
    tokens = drawn(300)
    found = summarise(lengths_of(tokens), [8]).distribution
    assert found.sequences == 300
    assert found.tokens == sum(tokens)
    assert found.empty == sum(n == 0 for n in tokens)
    assert (found.shortest, found.longest) == (min(tokens), max(tokens))
    assert found.mean == pytest.approx(sum(tokens) / 300)
    for q, value in found.percentiles.items():
        # The definition: so many percent are not longer, and no shorter length would do.
        assert sum(n <= value for n in tokens) >= q / 100 * 300
        assert sum(n < value for n in tokens) < q / 100 * 300
    buckets = found.buckets
    for first, end, rows, total in zip(
        buckets.starts[:-1], buckets.starts[1:], buckets.sequences, buckets.tokens, strict=True
    ):
        inside = [n for n in tokens if first <= n < end]
        assert (rows, total) == (len(inside), sum(inside))
    assert sum(buckets.sequences) == 300


def test_what_each_max_length_cuts() -> None:
    tokens = drawn(300)
    for at in summarise(lengths_of(tokens), MAX_LENGTHS).candidates:
        assert at.truncated == sum(n > at.max_length for n in tokens)
        assert at.cut_tokens == sum(max(n - at.max_length, 0) for n in tokens)
        assert at.unlabelled == 0


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("pairs", [False, True])
def test_rows_that_lose_every_label(mode: str, pairs: bool) -> None:
    tokens = drawn(200, seed=1)
    prompts = np.minimum(tokens, drawn(200, seed=2))
    if pairs:  # both answers follow one prompt
        prompts = np.repeat(np.minimum(prompts[::2], prompts[1::2]), 2)
    found = summarise(lengths_of(tokens, prompts, pairs), MAX_LENGTHS, truncation_mode=mode)
    for at in found.candidates:
        lost = 0
        for row in range(0, 200, 2 if pairs else 1):
            masks = [
                [False] * prompts[i] + [True] * (tokens[i] - prompts[i])
                for i in range(row, row + (2 if pairs else 1))
            ]
            cut = slice(at.max_length) if mode == "keep_start" else slice(-at.max_length, None)
            lost += any(map(any, masks)) and not any(any(mask[cut]) for mask in masks)
        assert at.unlabelled == lost
    assert any(at.unlabelled for at in found.candidates) == (mode == "keep_start")


def test_padding_share_of_batches() -> None:
    tokens = drawn(30, seed=3)
    pad = slots = 0
    for start in range(0, 30, 4):
        batch = tokens[start : start + 4]
        slots += len(batch) * max(batch)
        pad += sum(max(batch) - n for n in batch)
    assert padding_share(tokens[:, None], 4) == (pytest.approx(pad / slots), slots)
    assert padding_share(np.zeros((0, 1), np.int32), 4) == (0.0, 0)


def test_padding_of_pairs_is_to_the_longest_of_all_answers() -> None:
    share, slots = padding_share(np.array([[3, 9], [4, 4], [2, 1]]), 2)
    assert slots == 4 * 9 + 2 * 2
    assert share == pytest.approx(1 - 23 / 40)


@pytest.mark.parametrize("rows", [1, 5, 37, 400, 1003])
def test_grouping_is_that_of_transformers(rows: int) -> None:
    tokens = drawn(rows, seed=4) + 1
    theirs = get_length_grouped_indices(
        tokens.tolist(), 4, generator=torch.Generator().manual_seed(7)
    )
    permutation = torch.randperm(rows, generator=torch.Generator().manual_seed(7)).numpy()
    ours = permutation[length_grouped(tokens[permutation], 4)]
    np.testing.assert_array_equal(tokens[ours], tokens[theirs])


def test_padding_follows_the_seed_and_falls_when_grouped() -> None:
    lengths = lengths_of(drawn(500) + 1)
    one, again, other = (summarise(lengths, [32], seed=seed).candidates[0] for seed in (1, 1, 2))
    assert one == again
    assert one.padding_random != other.padding_random
    order = np.random.default_rng(1).permutation(500)
    clipped = np.minimum(lengths.tokens, 32)[order][:, None]
    assert one.padding_random == padding_share(clipped, 8)[0]
    assert one.plain_positions == padding_share(clipped, 8)[1]
    assert one.padding_grouped < one.padding_random


def test_fills_are_those_of_the_packing() -> None:
    tokens = drawn(300)
    for at in summarise(lengths_of(tokens), MAX_LENGTHS).candidates:
        assert [fill.strategy for fill in at.fills] == list(STRATEGIES)
        for fill in at.fills:
            report = pack_lengths(tokens, at.max_length, fill.strategy).report
            for name in ("rows", "fill_ratio", "dropped_tokens", "split_rows", "split_tokens"):
                assert getattr(fill, name) == getattr(report, name), (at.max_length, fill, name)


def test_length_that_keeps_a_share_of_the_tokens() -> None:
    tokens = np.sort(drawn(60, seed=5))
    for share in (0.3, 0.5, 0.9, 0.99, 1.0):
        enough = next(
            m for m in range(1, 100) if np.minimum(tokens, m).sum() >= share * tokens.sum()
        )
        assert length_that_keeps(tokens, share) == enough


@pytest.mark.parametrize(
    ("tokens", "limit", "wanted"),
    [
        ([100, 300, 5000], None, [512, 1024, 2048, 4096, 8192]),
        ([100, 300, 5000], 2000, [512, 1024, 2000]),
        ([100, 300, 5000], 100, [100]),
        ([64, 64], None, [64]),
        ([1], None, [1]),
    ],
)
def test_candidates_without_being_told(
    tokens: list[int], limit: int | None, wanted: list[int]
) -> None:
    found = summarise(lengths_of(tokens), position_limit=limit)
    assert [at.max_length for at in found.candidates] == wanted


def test_candidates_are_sorted_and_no_row_has_a_token() -> None:
    found = summarise(lengths_of([5]), [9, 3, 9])
    assert [at.max_length for at in found.candidates] == [3, 9]
    with pytest.raises(ValueError, match="no row has a token"):
        summarise(lengths_of([0, 0]))


@pytest.mark.slow
def test_ten_million_rows() -> None:
    tokens = np.exp(np.random.default_rng(0).uniform(math.log(64), math.log(8192), 10_000_000))
    found = summarise(lengths_of(tokens.astype(np.int32)), [4096])
    assert found.candidates[0].fill("bfd").fill_ratio > 0.99
