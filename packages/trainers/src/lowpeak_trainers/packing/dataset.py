"""TRL's `pack_dataset`, over the whole dataset instead of 1000 rows at a time."""

import logging
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from .plan import STRATEGIES, PackingPlan, Strategy, pack_lengths
from .tables import ROWS_READ_AT_ONCE, gather, pack_table, row_lengths, with_seq_lengths

__all__ = ["pack_dataset"]

logger = logging.getLogger("lowpeak.trainers")
AnyDataset: TypeAlias = Dataset | DatasetDict | IterableDataset | IterableDatasetDict


def pack_dataset(
    dataset: AnyDataset,
    seq_length: int,
    strategy: Strategy = "bfd",
    map_kwargs: dict[str, Any] | None = None,
) -> AnyDataset:
    """Packs a dataset of token lists into rows of at most ``seq_length`` tokens.

    Arguments and result are those of ``trl.pack_dataset``; the rows are TRL's where TRL sees the
    dataset in one batch of ``Dataset.map``, and better filled where it does not. Every column must
    hold one value for each token. ``bfd`` and ``bfd_split`` add ``seq_lengths``, the lengths of the
    documents in each row. For the strategies see ``pack_lengths``.

    A streaming dataset is packed ``batch_size`` rows at a time (an entry of ``map_kwargs``, 1000 if
    absent): as many are held in memory. The log has one INFO line with the report, of the first
    batch where the dataset is a stream. Raises ValueError for an unknown strategy, a ``seq_length``
    below 1 or columns that disagree in length, TypeError for a column without lists.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1, not {seq_length}")
    if strategy == "wrapped":
        _say_what_wrapped_means()
    options = map_kwargs or {}
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        splits = {
            name: pack_dataset(split, seq_length, strategy, options)
            for name, split in dataset.items()
        }
        return type(dataset)(splits)
    if isinstance(dataset, IterableDataset):
        return _pack_stream(dataset, seq_length, strategy, options)
    return _pack_all(dataset, seq_length, strategy, options)


@cache
def _say_what_wrapped_means() -> None:
    logger.warning(
        "packing strategy 'wrapped' joins documents: tokens attend to the documents before theirs. "
        "'bfd' and 'bfd_split' keep them apart"
    )


def _pack_all(
    dataset: Dataset, seq_length: int, strategy: Strategy, map_kwargs: dict[str, Any]
) -> Dataset:
    source = dataset.with_format("arrow")
    batches = [row_lengths(table) for table in source.iter(batch_size=ROWS_READ_AT_ONCE)]
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *batches])
    plan = pack_lengths(lengths, seq_length, strategy)
    logger.info("%s, %s", map_kwargs.get("desc", "packing"), plan.report)
    # A map over the source, though it reads other rows than its own: so caching, fingerprints,
    # processes and the place of the result are those of TRL's packing.
    packed = source.map(
        _packed_share,
        batched=True,
        with_indices=True,
        fn_kwargs={"source": source, "plan": plan},
        **map_kwargs,
    )
    form = dataset.format
    columns = form["columns"] + ([] if strategy == "wrapped" else ["seq_lengths"])
    return packed.with_format(
        form["type"], columns, form["output_all_columns"], **form["format_kwargs"]
    )


def _packed_share(
    _batch: pa.Table, indices: list[int], source: Dataset, plan: PackingPlan
) -> pa.Table:
    """Of the packed rows, the share that falls to the source rows ``indices``, consecutive ones."""
    count = len(plan.offsets) - 1
    first = count * indices[0] // len(source)
    last = count * (indices[-1] + 1) // len(source)
    begin, end = plan.offsets[first], plan.offsets[last]
    rows, places = np.unique(plan.rows[begin:end], return_inverse=True)
    offsets, lengths = plan.offsets[first : last + 1] - begin, plan.lengths[begin:end]
    packed = gather(source[rows.tolist()], places, plan.starts[begin:end], lengths, offsets)
    if plan.report.strategy == "wrapped":
        return packed
    return with_seq_lengths(packed, lengths, offsets)


def _pack_stream(
    dataset: IterableDataset, seq_length: int, strategy: Strategy, map_kwargs: dict[str, Any]
) -> IterableDataset:
    state = dataset._formatting
    packer = StreamPacker(seq_length, strategy)
    if dataset.features is None:
        # Without types datasets gives each row a table of its own, and then does not join the table
        # of an empty row, whose type nobody knows, to the others.
        packed = dataset.with_format(None).map(packer.rows, batched=True, **map_kwargs)
    else:
        packed = dataset.with_format("arrow").map(packer.table, batched=True, **map_kwargs)
    return packed.with_format(None if state is None else state.format_type)


class StreamPacker:
    """Packs the batches of a stream, each for itself, and reports the first."""

    def __init__(self, seq_length: int, strategy: Strategy) -> None:
        self._seq_length = seq_length
        self._strategy = strategy
        self._reported = False

    def table(self, table: pa.Table) -> pa.Table:
        packed, report = pack_table(table, self._seq_length, self._strategy)
        if not self._reported:
            self._reported = True
            logger.info("packing, the first rows of a stream, %s", report)
        return packed

    def rows(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        packed: dict[str, list[Any]] = self.table(pa.table(dict(columns))).to_pydict()
        return packed
