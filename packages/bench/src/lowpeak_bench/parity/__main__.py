"""`python -m lowpeak_bench.parity`: make the parity table, or a part of it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
from transformers.utils.logging import disable_progress_bar

from lowpeak_bench.environment import environment

from .cases import Case, all_cases
from .harness import Logs
from .report import Row, judge, markdown, write_json, write_markdown
from .run import moved, run_case, stock_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases; 1 when one of them failed."""
    options = _options(arguments)
    _quiet()
    cases = [case for case in all_cases() if case.name.startswith(tuple(options.only or [""]))]
    if not cases:
        raise SystemExit(f"no case begins with {', '.join(options.only)}")
    rows = run_all(cases)
    block = environment()
    text = markdown(rows, block)
    print(text)
    if options.markdown is not None:
        write_markdown(options.markdown, text)
    if options.json is not None:
        write_json(options.json, rows, block)
    return int(any(row.fault for row in rows))


def run_all(cases: Sequence[Case]) -> list[Row]:
    """One row per case, in their order; progress goes to stderr."""
    defaults: dict[str, Logs] = {}
    rows = []
    for index, case in enumerate(cases, start=1):
        with tempfile.TemporaryDirectory() as folder:
            result = run_case(case, Path(folder))
        default = case.default
        if default.same_runs_as(case):
            defaults[repr(default)] = result.stock
            moves_by = None
        else:
            if repr(default) not in defaults:
                with tempfile.TemporaryDirectory() as folder:
                    defaults[repr(default)] = stock_logs(default, Path(folder))
            moves_by = moved(result.stock, defaults[repr(default)])
        rows.append(judge(result, moves_by))
        print(
            f"{index}/{len(cases)} {case.name} {rows[-1].fault or 'ok'}",
            file=sys.stderr,
            flush=True,
        )
    return rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lowpeak_bench.parity", description=__doc__)
    parser.add_argument(
        "--only", action="append", help="cases whose name begins so, as 'DPO' or 'GRPO-dapo'"
    )
    parser.add_argument("--markdown", type=Path, help="page to put the table into (docs/parity.md)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args(arguments)


def _quiet() -> None:
    """Nothing but the table: these models are tiny, fastest on one thread, and warn of a lot."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    os.environ["TQDM_DISABLE"] = "1"
    for name in ("accelerate", "transformers", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
