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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.kernel_table import kernel_table
from lowpeak_bench.step_clock import Schedule, allocated, step_clock
from lowpeak_bench.training_cases import CONFIGS, SIDES, STOCK, Run, build_model, build_trainer
from lowpeak_bench.training_data import WORKLOADS, Case, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("lowpeak_bench.training_step")

# A run that starts with more than this still holds something of the run before it.
LEFTOVER_BYTES = 64 * 2**20
RATIOS = ("seconds", "peak_bytes", "activation_bytes")
CASE_NAMES = {
    Case(method, STOCK, 1, workload).name: (method, workload)
    for workload, (methods, _) in WORKLOADS.items()
    for method in methods
}


@dataclass(frozen=True)
class StepResult:
    """One case: what a step trained on, how long it took and how much it held.

    seconds is the median of step_seconds, which has the timed steps. The most bytes of a timed
    step: peak_bytes, in which allocated_before_bytes are, what the device held when the case began;
    and activation_bytes, the peak above what was allocated when the step began (weights, optimizer
    states and the batch; no gradients, which a Trainer frees between steps). losses and
    gradient_norms have every step, warm-up first. ratios_to_trl are parts of TRL's figures in the
    same run. prompt_tokens has a number an example, completion_tokens a list of them; padded_tokens
    is what a padded batch has.
    """

    trainer: str
    workload: str
    side: str
    tokens: int
    prompt_tokens: list[int]
    completion_tokens: list[list[int]]
    padded_tokens: int
    allocated_before_bytes: int | None = None
    seconds: float | None = None
    timed_steps: int = 0
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    ratios_to_trl: dict[str, float] = dataclasses.field(default_factory=dict)
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    gradient_norms: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None

    @property
    def label(self) -> str:
        """The trainer, and the workload where it is not one sequence."""
        trainer = self.trainer.upper()
        return trainer if self.workload == "sequence" else f"{trainer} {self.workload}"


def blank_result(case: Case, device: torch.device) -> StepResult:
    """Return the result of a case that has not run."""
    examples = case.examples
    lengths = [example.prompt + one for example in examples for one in example.completions]
    return StepResult(
        trainer=case.method,
        workload=case.workload,
        side=case.side,
        tokens=case.tokens,
        prompt_tokens=[example.prompt for example in examples],
        completion_tokens=[list(example.completions) for example in examples],
        padded_tokens=max(lengths) * len(lengths),
        allocated_before_bytes=allocated(device),
    )


def run_case(
    case: Case, options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> StepResult:
    """Train one case for warm-up and measured steps, and free everything it held."""
    device = torch.device(options.device)
    blank = blank_result(case, device)
    before = blank.allocated_before_bytes
    if before is not None and before > LEFTOVER_BYTES:
        logger.warning("%s starts with %d MiB of an earlier run", case, before // 2**20)
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
    schedule = Schedule(
        options.warmup, options.repeats, options.enough_seconds, options.profile is not None
    )
    clock = step_clock(device, schedule)
    model = build_model(options.config, getattr(torch, options.dtype), device)
    with tempfile.TemporaryDirectory() as output:
        run = Run(schedule.steps, output, options.warmup, options.warmup_tokens)
        trainer = build_trainer(case, model, tokenizer, run, clock)
        trainer.train()
    if options.profile is not None:
        title = f"{case.name}, {case.tokens} tokens, {case.side}"
        options.profile.write_text(kernel_table(clock.profile, title))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return dataclasses.replace(
        blank,
        seconds=statistics.median(clock.seconds),
        timed_steps=len(clock.seconds),
        peak_bytes=max(clock.peaks, default=None),
        activation_bytes=max(clock.activations, default=None),
        step_seconds=clock.seconds,
        losses=[float(entry["loss"]) for entry in logs],
        gradient_norms=[float(entry["grad_norm"]) for entry in logs],
    )


def with_ratios(results: Sequence[StepResult]) -> list[StepResult]:
    """Give each row of another side its ratios to TRL's row of the same case, where both ran."""
    stock = {_case_of(result): result for result in results if result.side == STOCK}
    return [
        dataclasses.replace(result, ratios_to_trl=_ratios(result, stock.get(_case_of(result))))
        for result in results
    ]


def _case_of(result: StepResult) -> tuple[str, str, int]:
    return result.trainer, result.workload, result.tokens


def _ratios(result: StepResult, stock: StepResult | None) -> dict[str, float]:
    if stock is None or stock is result:
        return {}
    pairs = {name: (getattr(result, name), getattr(stock, name)) for name in RATIOS}
    return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours and theirs}


def render_results(results: Sequence[StepResult]) -> str:
    """Render a row a case, each figure with its ratio to TRL's behind it.

    The gradient norm is that of the first step, where both sides have the same weights; the loss
    is that of the last.
    """
    headers = ["trainer", "tokens", "side", "s a step", "/ TRL", "peak GiB", "/ TRL"]
    headers += ["activations GiB", "/ TRL", "last loss", "first grad norm"]
    rows = []
    for result in results:
        time, peak, activations = (
            table.number(result.ratios_to_trl.get(name), 3) for name in RATIOS
        )
        rows.append(
            [
                result.label,
                f"{result.tokens}",
                result.side,
                "failed" if result.failure is not None else table.number(result.seconds, 3),
                time,
                table.gibibytes(result.peak_bytes),
                peak,
                table.gibibytes(result.activation_bytes),
                activations,
                table.number(result.losses[-1] if result.losses else None, 5),
                table.number(result.gradient_norms[0] if result.gradient_norms else None, 5),
            ]
        )
    notes = "".join(
        f"- {result.label} {result.tokens}, {result.side}: {result.failure}\n"
        for result in results
        if result.failure
    )
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def parse_case(text: str) -> tuple[str, str, int]:
    """Read "grpo:131072" or "dpo-ragged" as method, workload and tokens.

    Raises:
        argparse.ArgumentTypeError: where there is no such case, or the tokens are no number.
    """
    name, colon, digits = text.partition(":")
    if name not in CASE_NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is no case: use one of {', '.join(CASE_NAMES)}")
    if colon and not digits.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} has no number of tokens behind the colon")
    method, workload = CASE_NAMES[name]
    return method, workload, int(digits) if digits else WORKLOADS[workload][1]


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="training_step.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    methods = WORKLOADS["sequence"][0]
    add("--trainers", nargs="+", choices=methods, default=list(methods))
    add("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    add("--lengths", nargs="+", type=int, default=[8192, 32768], help="tokens of a sequence")
    add(
        "--cases",
        nargs="+",
        type=parse_case,
        help=f"in place of trainers and lengths: NAME:TOKENS with NAME of {', '.join(CASE_NAMES)}",
    )
    add("--config", choices=tuple(CONFIGS), default="gemma-3-1b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_cuda else "float32")
    add("--device", default="cuda" if on_cuda else "cpu")
    add("--repeats", type=int, default=3, help="most timed steps")
    add("--enough-seconds", type=float, default=20.0, help="of timed steps; then no more follow")
    add("--warmup", type=int, default=2, help="steps before the timed ones")
    add(
        "--warmup-tokens",
        type=int,
        default=32768,
        help="warm-up steps of longer sequences train on their first tokens only",
    )
    add("--json", type=Path, help="write results and environment here")
    add(
        "--profile",
        type=Path,
        help="profile one more step of the one case and side, write its kernels here",
    )
    return parser


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the cases of a command line, short sequences first where it names lengths."""
    chosen = options.cases or [
        (method, "sequence", tokens) for tokens in options.lengths for method in options.trainers
    ]
    return [
        Case(method, side, tokens, workload)
        for method, workload, tokens in chosen
        for side in options.sides
        if workload in (SIDES[side].workloads or WORKLOADS)
    ]


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run all cases and print one table.

    Returns 1 when a case of lowpeak failed; TRL may run out of memory first.
    """
    from datasets import disable_progress_bars

    command = parser()
    options = command.parse_args(arguments)
    cases = cases_of(options)
    if options.profile is not None and len(cases) != 1:
        command.error(f"--profile takes one case on one side, not {len(cases)}: name --sides")
    disable_progress_bars()
    tokenizer = build_tokenizer(CONFIGS[options.config]["vocab_size"])
    results: list[StepResult] = []
    for case in cases:
        results = with_ratios([*results, run_case(case, options, tokenizer)])
        # A line and the JSON after each case, so that a run cut short still shows what it had.
        stream.write(f"{json.dumps(dataclasses.asdict(results[-1]))}\n")
        stream.flush()
        if options.json is not None:
            _write_json(options, results)
    stream.write(table.heading(f"{options.config}, {options.dtype}", stream))
    stream.write(render_results(results))
    return int(any(result.failure and result.side != STOCK for result in results))


def _write_json(options: argparse.Namespace, results: Sequence[StepResult]) -> None:
    kept = ("config", "dtype", "device", "repeats", "enough_seconds", "warmup", "warmup_tokens")
    document: dict[str, Any] = {
        "benchmark": "training_step",
        "environment": environment(),
        "settings": {name: getattr(options, name) for name in kept},
        "results": [dataclasses.asdict(result) for result in results],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
