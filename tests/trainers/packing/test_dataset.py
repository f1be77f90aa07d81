"""Packed datasets: TRL's own where TRL sees all rows at once, better filled where it does not."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from datasets import Dataset, DatasetDict, Features, LargeList, List, Value

from lowpeak_trainers.packing import STRATEGIES, Strategy, pack_dataset
from lowpeak_trainers.packing import dataset as dataset_module

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def token_rows(count: int, longest: int, seed: int = 0) -> dict[str, list[list[int]]]:
    """Empty rows too; labels that hide a prompt, and a column of the user's own."""
    lengths = np.random.default_rng(seed).integers(0, longest + 1, count)
    ids = [[1000 * row + place for place in range(n)] for row, n in enumerate(lengths)]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    return {"input_ids": ids, "labels": labels, "assistant_masks": [[1] * len(row) for row in ids]}


def both(dataset: Any, seq_length: int, strategy: Strategy, **map_kwargs: Any) -> tuple[Any, Any]:
    theirs = trl.pack_dataset(dataset, seq_length, strategy, map_kwargs)
    return pack_dataset(dataset, seq_length, strategy, map_kwargs), theirs


def same(ours: Dataset, theirs: Dataset) -> None:
    assert ours.column_names == theirs.column_names
    assert ours.features == theirs.features
    assert ours.format == theirs.format
    assert ours.with_format(None)[:] == theirs.with_format(None)[:]


@every_strategy
@pytest.mark.parametrize("seq_length", [1, 7, 40, 64])
def test_equals_trl_within_its_window(strategy: Strategy, seq_length: int) -> None:
    same(*both(Dataset.from_dict(token_rows(200, 50)), seq_length, strategy))


@every_strategy
def test_equals_trl_on_more_rows_when_its_window_holds_them(strategy: Strategy) -> None:
    dataset = Dataset.from_dict(token_rows(2500, 12))
    same(*both(dataset, 16, strategy, batch_size=2500))
    theirs = trl.pack_dataset(dataset, 16, strategy, {"batch_size": 2500})
    # Gathered in other batches than it was planned: TRL's one.
    same(pack_dataset(dataset, 16, strategy, {"batch_size": 300}), theirs)


@every_strategy
def test_shuffled_large_lists_and_formats(strategy: Strategy) -> None:
    features = Features(
        {"input_ids": LargeList(Value("int32")), "labels": LargeList(Value("int64"))}
    )
    rows = token_rows(100, 20)
    rows.pop("assistant_masks")
    dataset = Dataset.from_dict(rows, features=features).shuffle(seed=3)
    same(*both(dataset, 16, strategy))
    same(*both(dataset.with_format("torch", columns=["input_ids"]), 16, strategy))


@every_strategy
def test_from_disk_and_from_the_cache(strategy: Strategy, tmp_path: Path) -> None:
    Dataset.from_dict(token_rows(300, 30)).save_to_disk(tmp_path / "rows")
    dataset = Dataset.load_from_disk(str(tmp_path / "rows"))
    ours, theirs = both(dataset, 32, strategy)
    same(ours, theirs)
    assert ours.cache_files
    again = pack_dataset(Dataset.load_from_disk(str(tmp_path / "rows")), 32, strategy)
    assert again.cache_files == ours.cache_files


# Python 3.12 warns of any fork beside threads, and torch has threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_several_processes() -> None:
    dataset = Dataset.from_dict(token_rows(301, 30))
    _, theirs = both(dataset, 32, "bfd")
    same(pack_dataset(dataset, 32, "bfd", {"num_proc": 2, "batch_size": 40}), theirs)


def test_global_packing_fills_what_windows_leave() -> None:
    """Long rows first and short ones last: no window of 1000 has both."""
    ids = [[1] * 5] * 1000 + [[2] * 3] * 1000
    ours, theirs = both(Dataset.from_dict({"input_ids": ids}), 8, "bfd")
    assert len(ours) == 1000
    assert len(theirs) == 1500
    assert ours[:]["seq_lengths"] == [[5, 3]] * 1000
    assert ours[:]["input_ids"] == [[1] * 5 + [2] * 3] * 1000


@every_strategy
def test_splits_of_a_dict(strategy: Strategy) -> None:
    splits = {name: Dataset.from_dict(token_rows(20, 9, seed)) for seed, name in enumerate("ab")}
    ours, theirs = both(DatasetDict(splits), 8, strategy)
    assert list(ours) == ["a", "b"]
    for name in splits:
        same(ours[name], theirs[name])


@every_strategy
def test_streams_equal_trl_batch_by_batch(strategy: Strategy) -> None:
    stream = Dataset.from_dict(token_rows(120, 20)).to_iterable_dataset()
    ours, theirs = both(stream, 16, strategy, batch_size=50)
    assert list(ours) == list(theirs)


def test_null_rows_are_empty_rows() -> None:
    features = Features({"input_ids": List(Value("int64"))})
    dataset = Dataset.from_dict({"input_ids": [[1, 2], None, [3]]}, features=features)
    same(*both(dataset, 3, "bfd"))
    assert pack_dataset(dataset, 3)[:]["seq_lengths"] == [[2, 1]]


@every_strategy
def test_nothing_to_pack(strategy: Strategy) -> None:
    assert len(pack_dataset(Dataset.from_dict({"input_ids": [[], []]}), 4, strategy)) == 0


def test_report_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowpeak.trainers")
    pack_dataset(Dataset.from_dict({"input_ids": [[1] * 6, [2] * 4]}), 5)
    assert "1 rows truncated (1 tokens dropped)" in caplog.text


def test_wrapped_says_once_that_it_mixes_documents(caplog: pytest.LogCaptureFixture) -> None:
    dataset_module._say_what_wrapped_means.cache_clear()
    for _ in range(2):
        pack_dataset(Dataset.from_dict({"input_ids": [[1, 2], [3]]}), 2, "wrapped")
    assert [record.message[:33] for record in caplog.records] == [
        "packing strategy 'wrapped' joins "
    ]


def test_wrong_input_is_named() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "text": ["a"], "labels": [[1]]})
    with pytest.raises(TypeError, match="'text' is of type string"):
        pack_dataset(rows, 4)
    with pytest.raises(ValueError, match="'labels' has 1 values in a row where 'input_ids' has 2"):
        pack_dataset(rows.remove_columns("text"), 4)
    with pytest.raises(ValueError, match="one of bfd, bfd_split, wrapped, not 'ffd'"):
        pack_dataset(rows, 4, "ffd")
    with pytest.raises(ValueError, match="seq_length must be at least 1, not 0"):
        pack_dataset(rows, 0)


@pytest.mark.parametrize(
    ("lengths", "seq_length"),
    [
        ([3, 37, 7, 16, 9, 50], 16),
        (np.random.default_rng(9).integers(0, 7, 2500).tolist(), 8),
    ],
    ids=["long", "many"],
)
def test_c9_overlong_documents(lengths: list[int], seq_length: int) -> None:
    """bfd keeps the beginnings, bfd_split every token in whole pieces, wrapped the stream."""
    ids = [[100 * row + place for place in range(n)] for row, n in enumerate(lengths)]
    dataset = Dataset.from_dict({"input_ids": ids})

    def documents(strategy: Strategy) -> list[list[int]]:
        packed = pack_dataset(dataset, seq_length, strategy)[:]
        result = []
        for row, sizes in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
            assert len(row) == sum(sizes) <= seq_length
            ends = np.cumsum(sizes).tolist()
            result += [row[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return sorted(result)

    pieces = [row[i : i + seq_length] for row in ids for i in range(0, len(row), seq_length)]
    assert documents("bfd") == [row[:seq_length] for row in ids if row]
    assert documents("bfd_split") == pieces
    stream = [token for row in ids for token in row]
    assert pack_dataset(dataset, seq_length, "wrapped")[:]["input_ids"] == [
        stream[i : i + seq_length] for i in range(0, len(stream), seq_length)
    ]
