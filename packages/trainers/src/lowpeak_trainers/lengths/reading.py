"""Rows from the hub, from a folder or from files, through `datasets`."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

__all__ = ["DatasetError", "Rows", "batches", "open_rows"]

Rows: TypeAlias = Dataset | IterableDataset
BUILDERS = {
    "json": (".json", ".jsonl"),
    "parquet": (".parquet",),
    "csv": (".csv",),
    "text": (".txt", ".text", ".md", ".rst"),
}
BUILDER_OF = {suffix: name for name, suffixes in BUILDERS.items() for suffix in suffixes}
UNDERSTOOD = ", ".join(BUILDER_OF)


class DatasetError(Exception):
    """The data or the model's tokenizer cannot be had or read; the message says what to do."""


def open_rows(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
    sample_by: str = "document",
) -> Rows:
    """Open a dataset by the name or path that ``datasets.load_dataset`` takes, or a file's.

    ``name``: a name on the hub, a folder, a file or a pattern of files; what ``save_to_disk`` wrote
    too. Text files give one row for each ``sample_by``: "document" (a file), "paragraph" or "line".
    Raises DatasetError where it cannot be had, with the reason and the remedy.
    """
    path = Path(name).expanduser()
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return _from_disk(path, split, streaming)
    arguments: dict[str, Any] = {"path": name, "name": config, "split": split}
    files = _files(name, path)
    kind = _builder(name, files) if files else None
    if kind == "text":
        arguments |= {"path": "text", "data_files": files, "sample_by": sample_by}
    elif kind is not None and not path.is_dir():
        arguments |= {"path": kind, "data_files": files}
    elif kind is not None:
        arguments["path"] = str(path)  # datasets finds the splits from the names in the folder
    with _explained(name):
        return load_dataset(**arguments, streaming=streaming)


def _files(name: str, path: Path) -> list[str]:
    """The files that are meant; empty for a name on the hub."""
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in BUILDER_OF)
        data = [p for p in found if not p.name.lower().startswith(("readme", "license"))]
        if not data:
            raise DatasetError(
                f"{name}: the folder has no file of a kind that is read: {UNDERSTOOD}"
            )
        return [str(p) for p in data]
    if glob.has_magic(name):
        matching = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - may be absolute
        if not matching:
            raise DatasetError(f"{name}: no file matches this pattern")
        return matching
    if path.suffix in BUILDER_OF or name.startswith(("/", "~", "./", "../")):
        raise DatasetError(f"{name}: there is no such file or folder here ({Path.cwd()})")
    return []


def _builder(name: str, files: list[str]) -> str:
    """The builder of `datasets` that reads these files."""
    kinds = {Path(file).suffix: BUILDER_OF.get(Path(file).suffix) for file in files}
    unknown = sorted(suffix or "no suffix" for suffix, kind in kinds.items() if kind is None)
    if unknown:
        raise DatasetError(f"{name}: {', '.join(unknown)} is not read; these are: {UNDERSTOOD}")
    builders = sorted({str(kind) for kind in kinds.values()})
    if len(builders) > 1:
        raise DatasetError(
            f"{name} mixes {' and '.join(builders)} files: name one kind by a pattern, such as "
            f"'{name.rstrip('/')}/*{BUILDERS[builders[0]][-1]}'"
        )
    return builders[0]


def batches(rows: IterableDataset, size: int) -> Iterator[dict[str, list[Any]]]:
    """Columns of ``size`` rows of a stream, again and again. Raises DatasetError if it breaks."""
    stream = iter(rows.iter(batch_size=size))
    while True:
        with _explained("the stream"):
            batch = next(stream, None)
        if batch is None:
            return
        yield batch


def _from_disk(path: Path, split: str, streaming: bool) -> Rows:
    try:
        loaded = load_from_disk(str(path))
    except IndexError as error:  # what datasets 5 raises where no row was saved
        raise DatasetError(f"{path} has no rows") from error
    if not isinstance(loaded, Dataset):
        if split not in loaded:
            raise DatasetError(f"--split {split}: {path} has the splits {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if streaming else loaded


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what `datasets` raises into a DatasetError with the remedy."""
    try:
        yield
    except DatasetNotFoundError as error:  # its message tells missing from gated
        raise DatasetError(
            f"{name}: {error}\nFor a private or gated dataset accept its terms on its page, then "
            "`hf auth login`."
        ) from error
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        raise DatasetError(f"{name} cannot be read: {error.__cause__ or error}") from error
    except ConnectionError as error:
        offline = datasets.config.HF_HUB_OFFLINE
        remedy = (
            "HF_HUB_OFFLINE is set: unset it, or name a local file or folder"
            if offline
            else "check the connection, or name a local file or folder"
        )
        raise DatasetError(f"{name} is no file or folder here. {error}: {remedy}") from error
    except StopIteration as error:  # what the builders raise for files without a byte
        raise DatasetError(f"{name} is empty") from error
    except (ValueError, FileNotFoundError) as error:  # an unknown split or configuration
        raise DatasetError(f"{name}: {error}") from error
