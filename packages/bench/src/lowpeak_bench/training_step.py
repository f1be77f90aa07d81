"""Benchmark of whole training steps: stock TRL beside lowpeak, real trainers, random weights."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.timing import synchronize
from lowpeak_bench.training_cases import (
    CONFIGS,
    METHODS,
    SIDES,
    Case,
    build_model,
    build_tokenizer,
    build_trainer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("lowpeak_bench.training_step")

# A run that starts with more than this still holds something of the run before it.
LEFTOVER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StepResult:
    """One case: median seconds of a step, peak allocated bytes, loss and gradient norm a step.

    allocated_before_bytes is what the device held when the case began: the peak includes it.
    """

    trainer: str
    side: str
    tokens: int
    seconds: float | None = None
    peak_bytes: int | None = None
    allocated_before_bytes: int | None = None
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    gradient_norms: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None


def step_clock(device: torch.device, warmup: int) -> Any:
    """Return a trainer callback that times every step and counts the peak after `warmup` steps.

    A step is forward, backward, clipping and optimizer; loading the batch is not in it.
    """
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            synchronize(device)
            if state.global_step == warmup and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            synchronize(device)
            self.seconds.append(time.perf_counter() - self.start)

    return StepClock()


def allocated(device: torch.device) -> int | None:
    """Return the bytes the caching allocator holds, or None on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def run_case(
    case: Case, options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> StepResult:
    """Train one case for warm-up and measured steps, and free everything it held."""
    device = torch.device(options.device)
    before = allocated(device)
    if before is not None and before > LEFTOVER_BYTES:
        logger.warning("%s starts with %d MiB of an earlier run", case, before // 2**20)
    blank = StepResult(case.method, case.side, case.tokens, allocated_before_bytes=before)
    try:
        return _train(case, options, tokenizer, blank)
    except Exception as error:  # out of memory is a result; the table shows it
        return dataclasses.replace(blank, failure=reason(error))
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _train(
    case: Case, options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, blank: StepResult
) -> StepResult:
    device = torch.device(options.device)
    clock = step_clock(device, options.warmup)
    model = build_model(options.config, getattr(torch, options.dtype), device)
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(
            case,
            model,
            tokenizer,
            steps=options.warmup + options.repeats,
            output=output,
            callback=clock,
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    measured = clock.seconds[options.warmup :]
    return dataclasses.replace(
        blank,
        seconds=statistics.median(measured),
        peak_bytes=peak,
        step_seconds=measured,
        losses=[float(entry["loss"]) for entry in logs],
        gradient_norms=[float(entry["grad_norm"]) for entry in logs],
    )


def render_results(results: Sequence[StepResult]) -> str:
    """Render a row a case.

    The gradient norm is that of the first step, where both sides have the same weights; the loss
    is that of the last.
    """
    headers = ["trainer", "tokens", "side", "s a step", "peak GiB", "last loss", "first grad norm"]
    rows = []
    for result in results:
        failed = result.failure is not None
        rows.append(
            [
                result.trainer.upper(),
                f"{result.tokens}",
                result.side,
                "failed" if failed else table.number(result.seconds, 3),
                table.gibibytes(result.peak_bytes),
                table.number(result.losses[-1] if result.losses else None, 5),
                table.number(result.gradient_norms[0] if result.gradient_norms else None, 5),
            ]
        )
    notes = "".join(
        f"- {result.trainer.upper()} {result.tokens}, {result.side}: {result.failure}\n"
        for result in results
        if result.failure
    )
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="training_step.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--trainers", nargs="+", choices=METHODS, default=list(METHODS))
    add("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    add("--lengths", nargs="+", type=int, default=[8192, 32768], help="tokens of a sequence")
    add("--config", choices=tuple(CONFIGS), default="gemma-3-1b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_cuda else "float32")
    add("--device", default="cuda" if on_cuda else "cpu")
    add("--repeats", type=int, default=3)
    add("--warmup", type=int, default=2)
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run all cases, short sequences first, and print one table.

    Returns 1 when a case of lowpeak failed; TRL may run out of memory first.
    """
    from datasets import disable_progress_bars

    options = parser().parse_args(arguments)
    disable_progress_bars()
    cases = [
        Case(method, side, tokens)
        for tokens in options.lengths
        for method in options.trainers
        for side in options.sides
    ]
    tokenizer = build_tokenizer(CONFIGS[options.config]["vocab_size"])
    results = []
    for case in cases:
        results.append(run_case(case, options, tokenizer))
        # One line a case, so that a run cut short still shows what it had.
        stream.write(f"{json.dumps(dataclasses.asdict(results[-1]))}\n")
        stream.flush()
    stream.write(table.heading(f"{options.config}, {options.dtype}", stream))
    stream.write(render_results(results))
    if options.json is not None:
        _write_json(options, results)
    return int(any(result.failure and result.side == "lowpeak" for result in results))


def _write_json(options: argparse.Namespace, results: Sequence[StepResult]) -> None:
    kept = ("config", "dtype", "device", "repeats", "warmup")
    document = {
        "benchmark": "training_step",
        "environment": environment(),
        "settings": {name: getattr(options, name) for name in kept},
        "results": [dataclasses.asdict(result) for result in results],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
