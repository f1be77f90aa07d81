"""The figures as text for a terminal, ASCII and at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..packing import STRATEGIES
from .advice import Advice, percent
from .summary import AtMaxLength, Distribution, Summary

__all__ = ["render"]

WIDTH = 100
BAR = 30


def render(summary: Summary, advice: Advice, heading: str) -> str:
    """Return all of it: heading, distribution, candidates, advice."""
    parts = [heading, _distribution(summary), _candidates(summary), _advice(advice)]
    return "\n\n".join(parts)


def _distribution(summary: Summary) -> str:
    found = summary.distribution
    named = {"min": found.shortest}
    named |= {"median" if q == 50 else f"{q}%": value for q, value in found.percentiles.items()}
    named["max"] = found.longest
    cells = [(name, f"{value:,}") for name, value in named.items()]
    cells.append(("mean", f"{found.mean:,.1f}"))
    widths = [max(len(name), len(value)) for name, value in cells]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(column, widths, strict=True))
        for column in zip(*cells, strict=True)
    ]
    of = "sequences (chosen, rejected)" if summary.sequences_per_row > 1 else "rows"
    title = f"Tokens of {found.sequences:,} {of}, {found.tokens:,} in all"
    if found.empty:
        title += f"; {found.empty:,} empty"
    return "\n".join([title, "", *(f"  {line}" for line in lines), "", *_histogram(found, of)])


def _histogram(found: Distribution, of: str) -> list[str]:
    buckets = found.buckets
    filled = [index for index, count in enumerate(buckets.sequences) if count]
    shown = range(filled[0], filled[-1] + 1)
    tallest = max(buckets.sequences)
    header = ("tokens", of.split()[0], "share", "of tokens")
    rows = []
    for index in shown:
        first, last = buckets.starts[index], buckets.starts[index + 1] - 1
        count = buckets.sequences[index]
        rows.append(
            (
                f"{first:,} - {last:,}" if last > first else f"{first:,}",
                f"{count:,}",
                percent(count / found.sequences),
                percent(buckets.tokens[index] / found.tokens),
            )
        )
    lines = _aligned([header, *rows])
    bars = ["", *("#" * -(-BAR * buckets.sequences[index] // tallest) for index in shown)]
    return [f"  {line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]


def _candidates(summary: Summary) -> str:
    packed = summary.sequences_per_row == 1
    lost = any(candidate.unlabelled for candidate in summary.candidates)
    groups: dict[str, list[str]] = {
        f"cut ({summary.truncation_mode})": ["rows" if packed else "sequences", "tokens"],
        "": ["lost rows"] * lost,
        f"padding, batches of {summary.batch_size}": ["random", "grouped"],
        "packed rows full": [*STRATEGIES] * packed,
    }
    rows = [_candidate(summary, candidate, lost) for candidate in summary.candidates]
    names = [name for group in groups.values() for name in group]
    widths = [max(map(len, column)) for column in zip(["max_length", *names], *rows, strict=True)]
    # A group's columns are at least as wide as its name, which stands above them.
    above, first = " " * widths[0], 1
    for title, group in groups.items():
        if not group:
            continue
        room = sum(widths[first : first + len(group)]) + 2 * (len(group) - 1)
        widths[first] += max(len(title) - room, 0)
        above += "  " + title.rjust(max(room, len(title)))
        first += len(group)
    lines = [above, *_aligned([["max_length", *names], *rows], widths)]
    return "\n".join([*(f"  {line}".rstrip() for line in lines), *_notes(summary, lost)])


def _notes(summary: Summary, lost: bool) -> list[str]:
    limit = summary.position_limit
    notes = []
    if lost:
        notes.append("lost rows: the prompt fills max_length, no token with a loss is left")
    if limit is not None and summary.candidates[-1].max_length > limit:
        notes.append(f"the model has {limit:,} positions")
    return [f"  {note}" for note in notes]


def _candidate(summary: Summary, candidate: AtMaxLength, lost: bool) -> list[str]:
    found = summary.distribution
    return [
        f"{candidate.max_length:,}",
        f"{candidate.truncated:,} ({percent(candidate.truncated / found.sequences)})",
        percent(candidate.cut_tokens / found.tokens),
        *([f"{candidate.unlabelled:,}"] * lost),
        percent(candidate.padding_random),
        percent(candidate.padding_grouped),
        *(percent(fill.fill_ratio) for fill in candidate.fills),
    ]


def _advice(advice: Advice) -> str:
    paragraphs = (f"Recommended: {advice.arguments}", advice.why, advice.cost)
    return "\n".join(textwrap.fill(text, WIDTH, break_on_hyphens=False) for text in paragraphs)


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[str]:
    widths = widths or [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
