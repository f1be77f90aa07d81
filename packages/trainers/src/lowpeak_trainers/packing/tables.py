"""Packed rows out of Arrow tables: the columns' tokens gathered as a plan says."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .plan import PackingReport, Strategy, pack_lengths

__all__ = ["gather", "pack_table", "row_lengths", "with_seq_lengths"]

Integers = NDArray[np.int64]
ROWS_READ_AT_ONCE = 10_000


def row_lengths(table: pa.Table) -> Integers:
    """Tokens in each row, 0 where it is null; all columns must be lists and agree.

    Raises TypeError for a column that is no list, ValueError for columns whose lengths differ.
    """
    lengths: Integers | None = None
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise TypeError(
                f"column {name!r} is of type {column.type}, but packing joins lists, one of a row: "
                "remove the column before packing"
            )
        own = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        if lengths is None:
            lengths = own
        elif not np.array_equal(own, lengths):
            row = int(np.flatnonzero(own != lengths)[0])
            raise ValueError(
                f"column {name!r} has {own[row]} values in a row where "
                f"{table.column_names[0]!r} has {lengths[row]}: packing needs one for each token"
            )
    if lengths is None:
        raise ValueError("the dataset has no columns to pack")
    return lengths


def gather(
    table: pa.Table, rows: Integers, starts: Integers, lengths: Integers, offsets: Integers
) -> pa.Table:
    """The packed rows that pieces given by ``rows``, ``starts`` and ``lengths`` make up.

    As in PackingPlan; ``rows`` index the table, ``offsets`` begin with 0. Types are kept.
    """
    sizes = row_lengths(table)
    ends = np.cumsum(lengths)
    begins = (np.cumsum(sizes) - sizes)[rows] + starts
    tokens = np.repeat(begins - (ends - lengths), lengths) + np.arange(lengths.sum())
    bounds = np.concatenate(([0], ends))[offsets]
    return pa.table(
        {
            name: _regrouped(column, tokens, bounds)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    )


def _regrouped(column: pa.ChunkedArray, tokens: Integers, bounds: Integers) -> pa.Array:
    # flatten() and not values: a slice's values are those of the whole array.
    values = pc.list_flatten(column).combine_chunks().take(pa.array(tokens))
    if pa.types.is_large_list(column.type):
        return pa.LargeListArray.from_arrays(pa.array(bounds, pa.int64()), values)
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values)


def with_seq_lengths(packed: pa.Table, lengths: Integers, offsets: Integers) -> pa.Table:
    """Adds the column ``seq_lengths``: how many tokens of each document a packed row holds."""
    large = pa.types.is_large_list(packed.column(0).type)
    values = pa.array(lengths, pa.int64() if large else pa.int32())
    column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return packed.append_column("seq_lengths", column)


def pack_table(
    table: pa.Table, seq_length: int, strategy: Strategy
) -> tuple[pa.Table, PackingReport]:
    """Packs the rows of one table; all but ``wrapped`` add the column ``seq_lengths``."""
    plan = pack_lengths(row_lengths(table), seq_length, strategy)
    packed = gather(table, plan.rows, plan.starts, plan.lengths, plan.offsets)
    if strategy != "wrapped":
        packed = with_seq_lengths(packed, plan.lengths, plan.offsets)
    return packed, plan.report
