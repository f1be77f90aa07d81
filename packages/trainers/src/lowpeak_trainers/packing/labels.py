"""Which rows still have a label when packing has cut them."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from .tables import ROWS_READ_AT_ONCE, Integers, row_lengths

__all__ = ["KeptLabels", "kept_labels"]

IGNORED = -100


class KeptLabels(NamedTuple):
    """Rows with a label, by what the first tokens of each still have."""

    kept: int
    lost: int


def kept_labels(dataset: Dataset, length: int) -> KeptLabels:
    """Counts the rows whose column ``labels`` has a label (not -100), kept or lost.

    Kept is a row with one among its first ``length`` tokens.
    """
    kept = lost = 0
    source = dataset.select_columns("labels").with_format("arrow")
    for table in source.iter(batch_size=ROWS_READ_AT_ONCE):
        first, lengths = _first_labels(table)
        kept += int((first < np.minimum(lengths, length)).sum())
        lost += int(((first >= length) & (first < lengths)).sum())
    return KeptLabels(kept, lost)


def _first_labels(table: pa.Table) -> tuple[Integers, Integers]:
    """The place of each row's first label, its length where it has none; and the lengths."""
    lengths = row_lengths(table)
    labels = pc.list_flatten(table["labels"]).to_numpy()
    ends = np.cumsum(lengths)
    # Of each row the first labelled place in the joined rows that is not before the row.
    places = np.append(np.flatnonzero(labels != IGNORED), labels.size)
    first = places[np.searchsorted(places, ends - lengths)]
    return np.minimum(first - (ends - lengths), lengths), lengths
