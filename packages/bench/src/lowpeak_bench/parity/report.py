"""The parity table as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowpeak_bench.environment import Environment
from lowpeak_bench.table import render, scientific

from .harness import STEPS, TOLERANCE
from .run import Result

BEGIN, END = "<!-- parity table: begin -->", "<!-- parity table: end -->"
HEADERS = (
    "loss",
    "option",
    "error of loss",
    "of gradient norm",
    "of other numbers",
    "worst of them",
    "option moves by",
)
# An option that moves loss or gradient norm by less is not told from rounding.
LEAST_MOVE = 1e-4


@dataclass(frozen=True)
class Row:
    """A case and its figures.

    Args:
        result: both runs.
        moves_by: by how much the option alone changes loss or gradient norm; None for a default.
        fault: why the case failed; empty if it did not.
    """

    result: Result
    moves_by: float | None
    fault: str

    def cells(self) -> tuple[str, ...]:
        """As HEADERS."""
        worst = self.result.worst()
        return (
            self.result.case.loss,
            self.result.case.option or "-",
            scientific(self.result.worst("loss").error),
            scientific(self.result.worst("grad_norm").error),
            scientific(worst.error),
            worst.name,
            scientific(self.moves_by),
        )

    def figures(self) -> dict[str, object]:
        """For the JSON file."""
        case, worst = self.result.case, self.result.worst()
        return {
            "trainer": case.trainer,
            "loss": case.loss,
            "option": case.option,
            "options": dict(case.options),
            "model": case.model,
            "loss_error": self.result.worst("loss").error,
            "grad_norm_error": self.result.worst("grad_norm").error,
            "other_error": worst.error,
            "other_name": worst.name,
            "numbers_compared": self.result.compared,
            "moves_by": self.moves_by,
            "fault": self.fault,
        }


def judge(result: Result, moves_by: float | None) -> Row:
    """The row of a result; its fault is a deviation, or an option that changed the wrong thing."""
    faults = result.faults()
    case = result.case
    if moves_by is not None and case.same_as_default and not moves_by <= TOLERANCE:
        faults.append(f"{case.option} moves loss or gradient norm by {moves_by:.1e}")
    if moves_by is not None and not case.same_as_default and not moves_by >= LEAST_MOVE:
        faults.append(f"{case.option} changes nothing, so the row shows nothing")
    return Row(result, moves_by, faults[0] if faults else "")


def markdown(rows: Sequence[Row], environment: Mapping[str, object]) -> str:
    """One table per trainer, and a line on what was run."""
    parts = [_summary(rows, environment)]
    for trainer in dict.fromkeys(row.result.case.trainer for row in rows):
        mine = [row.cells() for row in rows if row.result.case.trainer == trainer]
        parts.append(f"## {trainer}\n\n{render(HEADERS, mine)}")
    failed = [f"- {row.result.case.name}: {row.fault}" for row in rows if row.fault]
    if failed:
        parts.append("## Failed\n\n" + "\n".join(failed) + "\n")
    return "\n".join(parts)


def _summary(rows: Sequence[Row], environment: Mapping[str, object]) -> str:
    compared = sum(row.result.compared for row in rows)
    failed = sum(bool(row.fault) for row in rows)
    worst = max(d.error for row in rows for d in row.result.deviations)
    return (
        f"{len(rows)} pairs of runs of {STEPS} optimizer steps, {compared:,} numbers compared; the "
        f"largest deviation is {worst:.1e}, the tolerance {TOLERANCE:.0e}, and "
        f"{failed or 'none'} failed. TRL {environment['trl']}, transformers "
        f"{environment['transformers']}, torch {environment['torch']}, {environment['device']}.\n"
    )


def write_markdown(path: Path, text: str) -> None:
    """Put `text` between the two marks of an existing page.

    Raises:
        ValueError: when the page lacks the marks.
    """
    page = path.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        raise ValueError(f"{path} lacks the lines {BEGIN!r} and {END!r}")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def write_json(path: Path, rows: Sequence[Row], environment: Environment) -> None:
    """Write every figure with the environment it was made in."""
    block = {"environment": environment, "rows": [row.figures() for row in rows]}
    path.write_text(json.dumps(block, indent=1) + "\n", encoding="utf-8")
