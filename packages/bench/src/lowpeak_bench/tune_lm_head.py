"""Sweep of the tile sizes of lowpeak's LM head, to choose the planner's defaults.

Forward tiles are timed in a forward without gradients, backward tiles in forward and backward with
the planner's own forward tiles. The phases "frozen" and "expected" are single passes over chunks of
rows with all of the vocabulary, forward and backward; "fold" and "gradient" time one kernel on such
a chunk alone, by launch shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.launches import KERNELS, render_launches, sweep_launches
from lowpeak_bench.lm_head import SHAPES, differentiate, find_shape
from lowpeak_bench.lm_head_reference import make_problem
from lowpeak_bench.peers import Evaluate, HeadProblem, load_lowpeak
from lowpeak_bench.timing import interleaved_medians, peak_bytes

Phase = str
TILE_PHASES: tuple[Phase, ...] = ("forward", "backward")
CHUNK_PHASES: tuple[Phase, ...] = ("frozen", "expected")
PHASES: tuple[Phase, ...] = (*TILE_PHASES, *CHUNK_PHASES, *KERNELS)


@dataclass(frozen=True)
class TileMeasurement:
    """One tile of rows x columns logits in one phase; rows of 0 stand for the planner's choice.

    peak_bytes counts above the inputs: in the backward phase the gradients are in it.
    """

    shape: str
    head: str
    phase: Phase
    rows: int
    columns: int
    milliseconds: float | None = None
    peak_bytes: int | None = None
    failure: str | None = None


def candidates(options: argparse.Namespace, phase: Phase, vocabulary: int) -> list[tuple[int, int]]:
    """List the tiles to try, the planner's own first, no tile above --max-tile-bytes."""
    if phase in CHUNK_PHASES:
        chunks = [rows for rows in options.chunk_rows if rows <= options.tokens]
        return [(0, 0), *((rows, vocabulary) for rows in chunks)]
    item = torch.empty(0, dtype=getattr(torch, options.dtype)).element_size()
    tiles = [
        (rows, columns)
        for rows in options.rows
        for columns in options.columns
        if rows <= options.tokens and rows * columns * item <= options.max_tile_bytes
    ]
    return [(0, 0), *tiles]


def run_tile(evaluate: Evaluate, problem: HeadProblem, phase: Phase, tile: tuple[int, int]) -> Any:
    """Run a phase once with `tile`; the override must last until the backward pass is done."""
    from lowpeak.lm_head.planner import TilePlan, override

    plan = TilePlan(*tile) if tile[0] else None
    if phase == "forward":
        with override(plan_forward=plan), torch.no_grad():
            return evaluate(problem)
    with override(**{f"plan_{phase}": plan}):
        return differentiate(evaluate, problem)


def sweep(
    problem: HeadProblem, blank: TileMeasurement, options: argparse.Namespace
) -> list[TileMeasurement]:
    """Measure all candidate tiles in one phase, interleaved, the fastest first."""
    evaluate = load_lowpeak(options.outputs, expected=blank.phase == "expected")
    device = problem.hidden.device
    runs: list[Callable[[], Any]] = []
    results: list[TileMeasurement] = []
    failures: list[TileMeasurement] = []
    for tile in candidates(options, blank.phase, problem.weight.size(0)):
        run = functools.partial(run_tile, evaluate, problem, blank.phase, tile)
        result = dataclasses.replace(blank, rows=tile[0], columns=tile[1])
        try:
            run()
            results.append(dataclasses.replace(result, peak_bytes=peak_bytes(run, device)))
            runs.append(run)
        except RuntimeError as error:  # a tile that does not fit is a result
            failures.append(dataclasses.replace(result, failure=reason(error)))
    times = interleaved_medians(runs, device, repeats=options.repeats, warmup=options.warmup)
    timed = [
        dataclasses.replace(result, milliseconds=elapsed)
        for result, elapsed in zip(results, times, strict=True)
    ]
    return sorted(timed, key=lambda result: result.milliseconds or 0.0) + failures


def render_results(results: Sequence[TileMeasurement]) -> str:
    """Render one shape, head and phase."""
    rows = [
        [
            f"{result.rows} x {result.columns}" if result.rows else "planner",
            "failed" if result.failure else table.number(result.milliseconds, 2),
            table.mebibytes(result.peak_bytes),
        ]
        for result in results
    ]
    return table.render(["tile", "ms", "peak MiB"], rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="tune_lm_head.py", description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=[shape.name for shape in SHAPES], metavar="NAME|VxH")
    add("--tokens", type=int, default=8192)
    add("--heads", nargs="+", choices=("trained", "frozen"), default=["trained"])
    add("--phases", nargs="+", choices=PHASES, default=list(TILE_PHASES))
    add("--rows", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    add("--columns", nargs="+", type=int, default=[2048, 4096, 8192, 16384, 32768])
    add("--chunk-rows", nargs="+", type=int, default=[256, 512, 1024, 2048, 2736, 4096])
    add("--max-tile-bytes", type=table.parse_bytes, default=256 * table.MIB)
    add("--outputs", nargs="+", default=["log_probs"])
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=1)
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Sweep every shape, head and phase; print a table for each."""
    options = parser().parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    results: list[TileMeasurement] = []
    for shape in [find_shape(text) for text in options.shapes]:
        trained = make_problem(shape, options.tokens, dtype, device, 0.02)
        for head in options.heads:
            problem = trained
            if head == "frozen":
                problem = trained._replace(weight=trained.weight.detach())
            for phase in options.phases:
                if phase in KERNELS:
                    continue
                found = sweep(problem, TileMeasurement(shape.name, head, phase, 0, 0), options)
                results += found
                stream.write(table.heading(f"{shape.name}, {head} head, {phase}", stream))
                stream.write(render_results(found))
                stream.flush()
        for kernel in (phase for phase in options.phases if phase in KERNELS):
            for rows in options.chunk_rows:
                launches = sweep_launches(kernel, rows, problem.weight.size(0), dtype, options)
                title = f"{shape.name}, {kernel} kernel, {rows} rows"
                stream.write(table.heading(title, stream))
                stream.write(render_launches(launches))
                stream.flush()
    if options.json is not None:
        document = {
            "benchmark": "tune_lm_head",
            "environment": environment(),
            "settings": {"tokens": options.tokens, "dtype": options.dtype},
            "results": [dataclasses.asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0
