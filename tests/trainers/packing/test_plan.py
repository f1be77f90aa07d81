"""Plans from lengths: TRL's rows in TRL's order, and a report that adds up."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import data_utils

from lowpeak_trainers.packing import STRATEGIES, PackingPlan, Strategy, pack_lengths

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)

Pieces = list[list[tuple[int, int]]]
"""The tokens of each packed row, as (source row, place in it)."""


def planned(plan: PackingPlan) -> Pieces:
    pieces = [
        [(row, start + i) for i in range(length)]
        for row, start, length in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True
        )
    ]
    bounds = zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True)
    return [list(chain.from_iterable(pieces[begin:end])) for begin, end in bounds]


def packed_by_trl(lengths: list[int], capacity: int, strategy: Strategy) -> Pieces:
    rows = pa.table(
        {
            "row": pa.array([[i] * n for i, n in enumerate(lengths)], type=pa.list_(pa.int64())),
            "place": pa.array([list(range(n)) for n in lengths], type=pa.list_(pa.int64())),
        }
    )
    if strategy == "wrapped":
        packed = data_utils._pack_wrapped(rows, capacity)
    else:
        overflow = "split" if strategy == "bfd_split" else "truncate"
        packed = data_utils._pack_bfd(rows, capacity, overflow)
    columns = packed.to_pydict()
    return [
        list(zip(*pair, strict=True)) for pair in zip(columns["row"], columns["place"], strict=True)
    ]


@every_strategy
@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(0, 3), min_size=1, max_size=50).filter(any),
    capacity=st.integers(1, 30),
)
def test_equals_trl(strategy: Strategy, lengths: list[int], capacity: int) -> None:
    plan = pack_lengths(lengths, capacity, strategy)
    assert planned(plan) == packed_by_trl(lengths, capacity, strategy)
    again = pack_lengths(np.array(lengths, dtype=np.int32), capacity, strategy)
    assert planned(again) == planned(plan)
    assert again.report == plan.report


@every_strategy
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=50), capacity=st.integers(1, 30))
def test_report_adds_up(strategy: Strategy, lengths: list[int], capacity: int) -> None:
    plan = pack_lengths(lengths, capacity, strategy)
    report, packed = plan.report, planned(plan)
    tokens = [token for row in packed for token in row]
    assert report.source_tokens == sum(lengths)
    assert report.empty_rows == lengths.count(0)
    assert (report.rows, report.tokens) == (len(packed), len(tokens))
    assert len(tokens) == len(set(tokens))
    assert all(0 < len(row) <= capacity for row in packed)
    if packed:
        assert report.fill_ratio == pytest.approx(len(tokens) / (len(packed) * capacity))
    too_long = [n for n in lengths if n > capacity]
    if strategy == "bfd":
        assert report.truncated_rows == len(too_long)
        assert report.dropped_tokens == sum(n - capacity for n in too_long)
        assert report.split_rows == report.split_tokens == 0
    else:
        assert report.truncated_rows == report.dropped_tokens == 0
    if strategy == "bfd_split":
        assert report.split_rows == len(too_long)
        assert report.split_tokens == sum(n - capacity for n in too_long)


def test_wrapped_counts_the_rows_it_cuts() -> None:
    report = pack_lengths([3, 0, 3, 2], 4, "wrapped").report
    assert (report.rows, report.split_rows, report.split_tokens) == (2, 1, 2)
    assert report.fill_ratio == 1.0


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), max_size=60))
def test_bfd_is_bfd_split_when_nothing_is_too_long(lengths: list[int]) -> None:
    bfd, split = (pack_lengths(lengths, 30, strategy) for strategy in ("bfd", "bfd_split"))
    for field in ("rows", "starts", "lengths", "offsets"):
        np.testing.assert_array_equal(getattr(bfd, field), getattr(split, field))


@every_strategy
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_pack(strategy: Strategy, lengths: list[int]) -> None:
    plan = pack_lengths(lengths, 8, strategy)
    assert plan.offsets.tolist() == [0]
    assert plan.report.rows == 0
    assert plan.report.fill_ratio == 1.0


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_one_token_to_a_row(strategy: Strategy) -> None:
    plan = pack_lengths([2, 0, 1], 1, strategy)
    assert planned(plan) == [[(0, 0)], [(0, 1)], [(2, 0)]]


def test_packing_is_global() -> None:
    """A window of 1000 rows would leave every row of 5 alone."""
    lengths = [5] * 1000 + [3] * 1000
    assert pack_lengths(lengths, 8).report.rows == 1000
    assert pack_lengths(lengths, 8).report.fill_ratio == 1.0


def test_report_reads_well() -> None:
    assert str(pack_lengths([6, 2, 0, 2], 4).report) == (
        "bfd: 4 rows of 10 tokens in 2 packed rows of 4, 100.00% full; "
        "1 rows truncated (2 tokens dropped), 0 split (0 tokens split off), 1 empty"
    )


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="one of bfd, bfd_split, wrapped, not 'ffd'"):
        pack_lengths([1], 4, "ffd")
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        pack_lengths([1], 0)
    with pytest.raises(ValueError, match="negative, but one is -2"):
        pack_lengths([1, -2], 4)
    with pytest.raises(TypeError, match="integers, not float64"):
        pack_lengths([1.0], 4)
