"""The table in the terminal, and the report as one HTML file that needs no other."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from lowpeak_bench.quickstart.charts import as_data_uri, draw_memory
from lowpeak_bench.quickstart.compare import HEADER_NOTES, HEADERS, Comparison, table_rows
from lowpeak_bench.table import render

CPU_NOTE = (
    "TRL projects every row onto the vocabulary on CPU, prompt and padding included, and masks "
    "afterwards; on GPUs it projects only the rows that have a label. CPU ratios are therefore "
    "not GPU ratios, neither in time nor in memory."
)

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #444; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
tr.ratio td { border-bottom: 1px solid #bbb; color: #555; }
table.environment td { text-align: left; border-bottom: 1px solid #ddd; }
img { width: 100%; }
.problem { background: #fbe3e0; border-left: 4px solid #b3261e; padding: .5rem 1rem; }
.agreement { background: #e4f2e7; border-left: 4px solid #2e7d32; padding: .5rem 1rem; }
.note { background: #f3f3f3; border-left: 4px solid #888; padding: .5rem 1rem; }
small { color: #555; }
"""


def print_table(comparisons: Sequence[Comparison], stream: TextIO) -> None:
    """Write the table, drawn by rich on a terminal, Markdown elsewhere, and what it means."""
    rows = table_rows(comparisons)
    if stream.isatty():
        _draw_table(rows, stream)
    else:
        stream.write("\n" + render(HEADERS, rows))
    stream.write("\n" + "\n".join(HEADER_NOTES) + "\n")


def _draw_table(rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Stock TRL and lowpeak, same data and seed")
    for index, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if index < 2 else "right")
    for index, row in enumerate(rows):
        is_ratio = index % 3 == 2
        table.add_row(*row, end_section=is_ratio, style="bold" if is_ratio else "")
    Console(file=stream).print(table)


def conclusions(comparisons: Sequence[Comparison]) -> tuple[list[str], list[str]]:
    """Return problems (deviations beyond the tolerance) and notes, in words."""
    problems = [problem for comparison in comparisons for problem in comparison.problems]
    notes = [note for comparison in comparisons for note in comparison.notes]
    if any(comparison.stock["precision"] == "float32" for comparison in comparisons):
        notes.append(CPU_NOTE)
    return problems, notes


def write_report(
    path: Path,
    comparisons: Sequence[Comparison],
    environment: Mapping[str, object],
    settings: Mapping[str, object],
) -> None:
    """Write the report: pictures of live memory, the table, the environment."""
    problems, notes = conclusions(comparisons)
    agreement = ", ".join(
        f"{comparison.trainer.upper()} within {comparison.tolerance:.0e} "
        f"({comparison.stock['precision']})"
        for comparison in comparisons
    )
    verdict = (
        [_paragraph(problem, "problem") for problem in problems]
        if problems
        else [_paragraph(f"Losses and gradient norms agree: {agreement}.", "agreement")]
    )
    sections = [
        "<h1>lowpeak quickstart</h1>",
        "<p>The same model, data and seed, trained with the trainers of stock TRL and with those "
        "of lowpeak.</p>",
        *verdict,
        _table(comparisons),
        *(_paragraph(note, "note") for note in notes),
        "<h2>Live memory over a step</h2>",
        "<p>From the allocator's own events, over the last step: generation (GRPO), forward, "
        "backward, optimizer.</p>",
        *(_picture(comparison) for comparison in comparisons),
        "<h2>Settings</h2>",
        _pairs(settings),
        "<h2>Environment</h2>",
        _pairs(environment),
    ]
    body = "\n".join(sections)
    path.write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>lowpeak quickstart</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _paragraph(text: str, kind: str) -> str:
    return f'<p class="{kind}">{html.escape(text)}</p>'


def _picture(comparison: Comparison) -> str:
    label = f"Live memory over the last step of {comparison.trainer.upper()}, TRL and lowpeak"
    return f'<img alt="{label}" src="{as_data_uri(draw_memory(comparison))}">'


def _table(comparisons: Sequence[Comparison]) -> str:
    lines = ["<table>", _row("th", HEADERS)]
    for index, row in enumerate(table_rows(comparisons)):
        lines.append(_row("td", row, "ratio" if index % 3 == 2 else "figures"))
    lines.append("</table>")
    lines.append("<small>" + "<br>".join(html.escape(note) for note in HEADER_NOTES) + "</small>")
    return "\n".join(lines)


def _row(cell: str, values: Sequence[str], kind: str = "head") -> str:
    cells = "".join(f"<{cell}>{html.escape(value)}</{cell}>" for value in values)
    return f'<tr class="{kind}">{cells}</tr>'


def _pairs(values: Mapping[str, object]) -> str:
    lines = ['<table class="environment">']
    for key, value in values.items():
        shown = "not there" if value is None else str(value)
        lines.append(f"<tr><td>{html.escape(key)}</td><td>{html.escape(shown)}</td></tr>")
    return "\n".join([*lines, "</table>"])
