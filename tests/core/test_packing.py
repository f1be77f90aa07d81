"""Best-fit decreasing: equal to TRL's own packing, and the same with and without the extension."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowpeak import packing
from lowpeak.native import native_available
from lowpeak.packing import best_fit_decreasing

both = pytest.mark.parametrize(
    "native",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(not native_available(), reason="lowpeak._native is not built"),
        ),
    ],
    ids=["python", "native"],
)


def pack(
    lengths: "list[int] | np.ndarray", capacity: int, native: bool
) -> tuple[list[int], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "native_available", lambda: native)
        result = best_fit_decreasing(lengths, capacity)
    assert result.items.dtype == result.offsets.dtype == np.int64
    return result.items.tolist(), result.offsets.tolist()


def packed_by_trl(lengths: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Every token carries the number of its row, so that TRL's answer can be read off."""
    data_utils = pytest.importorskip("trl.data_utils")
    rows = pa.table({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    packed = data_utils._pack_bfd(rows, capacity).to_pydict()
    items, offsets = [], [0]
    for tokens, sizes in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        items += [tokens[sum(sizes[:k])] for k in range(len(sizes))]
        offsets.append(len(items))
    return items, offsets


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.sampled_from([1, 2, 7, 64, 65, 300]))
    lengths = st.integers(1, capacity) | st.integers(1, max(1, capacity // 8))
    return draw(st.lists(lengths, min_size=1, max_size=120)), capacity


@both
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_equals_trl(native: bool, problem: tuple[list[int], int]) -> None:
    assert pack(*problem, native) == packed_by_trl(*problem)


@both
@pytest.mark.parametrize("capacity", [97, 4097])
def test_equals_trl_on_more_rows_than_a_sort_takes_at_once(native: bool, capacity: int) -> None:
    """Arrow counts instead of comparing above 1024 values; equal ones must stay in order."""
    lengths = np.random.default_rng(0).integers(1, 60, 3000)
    lengths[::5] = capacity // 2
    assert pack(lengths, capacity, native) == packed_by_trl(lengths.tolist(), capacity)


@both
def test_edges(native: bool) -> None:
    assert pack([], 4, native) == ([], [0])
    assert pack([1, 1], 1, native) == ([0, 1], [0, 1, 2])
    assert pack([4, 2, 3, 1], 4, native) == ([0, 2, 3, 1], [0, 1, 3, 4])
    assert pack([5, 7, 5], 2**62, native) == ([1, 0, 2], [0, 3])
    assert pack(np.array([2, 9, 1, 9], dtype=np.int32)[::2], 3, native) == ([0, 1], [0, 2])


@both
def test_every_item_once_and_no_bin_too_full(native: bool) -> None:
    lengths = np.exp(np.random.default_rng(1).uniform(0, np.log(8192), 20_000)).astype(np.int64)
    items, offsets = pack(lengths, 8192, native)
    assert sorted(items) == list(range(20_000))
    contents = np.add.reduceat(lengths[items], offsets[:-1])
    assert contents.max() <= 8192
    # The least number of bins there can be: so much may be asked of these lengths.
    assert len(contents) == -(-lengths.sum() // 8192)
    assert (items, offsets) == pack(lengths, 8192, native)


@both
@pytest.mark.parametrize("lengths", [[1, 0], [-1], [5]])
def test_lengths_out_of_range_are_named(native: bool, lengths: list[int]) -> None:
    worst = next(length for length in lengths if not 1 <= length <= 4)
    with pytest.raises(ValueError, match=rf"1\.\.4.* one is {worst}"):
        pack(lengths, 4, native)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        best_fit_decreasing([1], 0)
    with pytest.raises(TypeError, match="integers, not float64"):
        best_fit_decreasing([1.5], 2)
    with pytest.raises(ValueError, match="one dimension, not 2"):
        best_fit_decreasing([[1]], 2)
