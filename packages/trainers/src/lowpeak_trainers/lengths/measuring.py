"""Token counts of all rows of a dataset or a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from numpy.typing import NDArray
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from .reading import DatasetError, Rows, batches
from .rows import Format, count_tokens, find_format, is_conversational

__all__ = ["Lengths", "measure"]

Counts = NDArray[np.int32]
# Their ids are Python integers for a moment: a hundred rows of a million tokens are 4 GB.
ROWS_AT_ONCE = 100
COUNTS = {"tokens": Value("int32"), "prompts": Value("int32")}


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of each sequence of a dataset; four bytes each, and four for the prompt."""

    tokens: Counts
    """int32 [rows * sequences_per_row]; the chosen and the rejected one of a pair in turn."""
    prompts: Counts
    """How many of them are prompt, without a loss: int32, as many; 0 where all is trained."""
    format: Format
    conversational: bool
    sequences_per_row: int
    """2 for preference rows, 1 else."""
    images: bool
    """Whether rows have images besides, whose tokens are not counted."""

    @property
    def rows(self) -> int:
        """Rows of the dataset."""
        return self.tokens.size // self.sequences_per_row


def measure(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    text_field: str | None = None,
    chat_template: str | None = None,
    max_rows: int | None = None,
    seed: int = 42,
    num_proc: int | None = None,
) -> Lengths:
    """Count the tokens of all rows, or of ``max_rows``.

    Of a dataset ``max_rows`` are drawn at random, of a stream they are the first. ``tokenizer``
    may be None for tokenised rows; ``chat_template`` None is the tokenizer's own. A dataset is
    counted by ``Dataset.map``, in ``num_proc`` processes, with its cache and its progress bar.
    Raises DatasetError for empty data, unknown columns, and where a tokenizer or a chat template
    is missing.
    """
    first = _first(rows)
    form = find_format(list(first), text_field)
    conversational = is_conversational(first, form)
    if tokenizer is None and form != "tokenised":
        raise DatasetError(
            "--model_name_or_path is needed: only rows with input_ids are counted without it"
        )
    if conversational and tokenizer is not None and not (chat_template or tokenizer.chat_template):
        raise DatasetError(
            f"the rows are conversations, and {tokenizer.name_or_path} has no chat template: name "
            "a Jinja file or a model that has one by --chat_template_path"
        )
    images = not {"image", "images"}.isdisjoint(first)
    arguments = {
        "form": form,
        "text_field": text_field or "text",
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }
    if isinstance(rows, IterableDataset):
        columns = _count_stream(rows, max_rows, arguments)
    else:
        if max_rows is not None and max_rows < len(rows):
            rows = rows.shuffle(seed=seed).select(range(max_rows))
        columns = _count_dataset(rows, num_proc, arguments)
    return Lengths(*columns, form, conversational, 2 if form == "preference" else 1, images)


def _first(rows: Rows) -> dict[str, Any]:
    if isinstance(rows, Dataset):
        batch: dict[str, list[Any]] = rows[:1]
    else:
        batch = next(batches(rows, 1), {})
    row = {name: values[0] for name, values in batch.items() if values}
    if not row:
        raise DatasetError("the dataset has no rows")
    return row


def _count_dataset(
    rows: Dataset, num_proc: int | None, arguments: dict[str, Any]
) -> tuple[Counts, Counts]:
    counted = rows.map(
        count_tokens,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        num_proc=num_proc,
        fn_kwargs=arguments,
        remove_columns=rows.column_names,
        features=Features(COUNTS),
        desc="Counting tokens",
    )
    table = counted.with_format("arrow")[:]
    tokens, prompts = (table.column(name).to_numpy() for name in COUNTS)
    return tokens, prompts


def _count_stream(
    rows: IterableDataset, max_rows: int | None, arguments: dict[str, Any]
) -> tuple[Counts, Counts]:
    if max_rows is not None:
        rows = rows.take(max_rows)
    parts: list[tuple[Counts, Counts]] = []
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=max_rows, desc="Counting tokens", unit=" rows", disable=None) as bar:
        for batch in batches(rows, ROWS_AT_ONCE):
            counts = count_tokens(batch, **arguments)
            tokens, prompts = (np.asarray(counts[name], dtype=np.int32) for name in COUNTS)
            parts.append((tokens, prompts))
            bar.update(len(next(iter(batch.values()))))
    tokens, prompts = (np.concatenate(column) for column in zip(*parts, strict=True))
    return tokens, prompts
