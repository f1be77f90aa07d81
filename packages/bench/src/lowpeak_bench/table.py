"""Tables and figures as plain text, for a terminal, a log file and a README alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

MIB = 2**20
GIB = 2**30


def render(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render rows as an aligned Markdown table: first column left, the others right."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells, the table {len(headers)} columns: {row}")
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(3, *(len(cell) for cell in column)) for column in columns]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(row, widths) for row in (headers, rule, *rows)) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join(padded) + " |"


def heading(text: str, stream: TextIO) -> str:
    """Return a heading: bold on a terminal, Markdown elsewhere."""
    return f"\n\033[1m{text}\033[0m\n\n" if stream.isatty() else f"\n## {text}\n\n"


def number(value: float | None, digits: int = 1) -> str:
    """Format a figure, or "-" where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def scientific(value: float | None) -> str:
    """Format an error, or "-" where there is none."""
    return "-" if value is None else f"{value:.1e}"


def mebibytes(size: float | None, digits: int = 0) -> str:
    """Format bytes in MiB, or "-" where they are not known."""
    return "-" if size is None else number(size / MIB, digits)


def gibibytes(size: float | None, digits: int = 2) -> str:
    """Format bytes in GiB, or "-" where they are not known."""
    return "-" if size is None else number(size / GIB, digits)


def parse_bytes(text: str) -> int:
    """Read a size such as "64MiB", "1GiB" or "1048576" (bytes)."""
    units = {"KiB": 2**10, "MiB": MIB, "GiB": GIB}
    suffix = text[-3:]
    digits, unit = (text[:-3], units[suffix]) if suffix in units else (text, 1)
    if not digits.isdigit():
        raise ValueError(f"size is {text!r}; write bytes, or a number with KiB, MiB or GiB")
    return int(digits) * unit
