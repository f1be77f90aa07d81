"""Rows from files, folders, patterns and saved datasets; and the hub that cannot be reached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError

from lowpeak_trainers.lengths import DatasetError, open_rows, reading

TEXTS = ["w7 w8", "w9", "w10 w11 w12"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = Dataset.from_dict({"text": TEXTS})
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        case ".json":
            path.write_text(json.dumps([{"text": text} for text in TEXTS]))
        case ".parquet":
            rows.to_parquet(path)
        case ".csv":
            rows.to_csv(path)
        case _:
            path.write_text("\n".join(TEXTS))
    return path


def texts(name: str | Path, **options) -> list[str]:
    return [row["text"] for row in open_rows(str(name), **options)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "csv"])
def test_files_and_folders(suffix: str, streaming: bool, tmp_path: Path) -> None:
    file = write(tmp_path / "data" / f"rows.{suffix}")
    (file.parent / "README.md").write_text("what this is")
    for name in (file, file.parent, file.parent / f"*.{suffix}"):
        assert texts(name, streaming=streaming) == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_text_files(streaming: bool, tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "b.md").write_text("one\n\ntwo")
    whole = ["\n".join(TEXTS), "one\n\ntwo"]
    assert texts(tmp_path, streaming=streaming) == whole
    assert texts(tmp_path / "a.txt", sample_by="line", streaming=streaming) == TEXTS
    assert texts(tmp_path / "**/*.md", sample_by="paragraph", streaming=streaming) == ["one", "two"]


def test_splits_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").write_text('{"text": "w9"}\n')
    assert texts(tmp_path) == TEXTS
    assert texts(tmp_path, split="test") == ["w9"]
    assert texts(tmp_path, split="train[:1]") == TEXTS[:1]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_save_to_disk_wrote(streaming: bool, tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "one", streaming=streaming) == TEXTS
    assert texts(tmp_path / "splits", split="test", streaming=streaming) == ["w9"]
    with pytest.raises(DatasetError, match=r"--split dev(?s:.*)has the splits train, test"):
        open_rows(str(tmp_path / "splits"), split="dev")
    rows.select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(DatasetError, match="no rows"):
        open_rows(str(tmp_path / "none"), streaming=streaming)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data" / "rows.jsonl")
    for name in ("~/data/rows.jsonl", "~/data", "~/data/*.jsonl"):
        assert texts(name) == TEXTS


@pytest.mark.parametrize("name", ["rows.jsonl", "./rows", "/no/such/folder", "~/no/such"])
def test_missing_files_are_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(DatasetError, match=f"{name}: there is no such file or folder here"):
        open_rows(name)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text("{nope")
    (tmp_path / "book.epub").touch()
    (tmp_path / "nothing").mkdir()
    write(tmp_path / "mixed" / "a.jsonl")
    write(tmp_path / "mixed" / "a.txt")
    for name, message in {
        "empty.jsonl": "empty.jsonl is empty",
        "broken.jsonl": "broken.jsonl cannot be read: JSON parse error",
        "book.epub": r".epub is not read; these are: .json, .jsonl, .parquet",
        "nothing": "no file of a kind that is read: .json",
        "mixed": r"mixes json and text files: name one kind by a pattern, such as '.*/\*.jsonl'",
        "*.parquet": "no file matches",
    }.items():
        with pytest.raises(DatasetError, match=message):
            open_rows(str(tmp_path / name))
    stream = open_rows(str(tmp_path / "broken.jsonl"), streaming=True)
    with pytest.raises(DatasetError, match="the stream cannot be read: JSON parse error"):
        list(reading.batches(stream, 10))


def test_splits_and_configurations_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    with pytest.raises(DatasetError, match=r"Unknown split \"dev\". Should be one of \['train'\]"):
        open_rows(str(tmp_path / "rows.jsonl"), split="dev")
    with pytest.raises(DatasetError, match=r"'other' not found. Available: .'default'"):
        open_rows(str(tmp_path), config="other")


def test_the_hub_out_of_reach() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(DatasetError, match=r"org/name is no file or folder here(?s:.*)unset it"):
        open_rows("org/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DatasetNotFoundError("'org/name' is a gated dataset"), "gated(?s:.*)hf auth login"),
        (ConnectionError("no route"), "no route"),
        (pa.ArrowInvalid("bad block"), "org/name cannot be read: bad block"),
    ],
)
def test_what_the_hub_says(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(**_arguments: object) -> None:
        raise error

    monkeypatch.setattr(reading, "load_dataset", load_dataset)
    with pytest.raises(DatasetError, match=message):
        open_rows("org/name")


def test_the_hub_gets_the_arguments_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(reading, "load_dataset", lambda **arguments: seen.update(arguments))
    open_rows("org/name", config="en", split="dev", streaming=True)
    assert seen == {"path": "org/name", "name": "en", "split": "dev", "streaming": True}
