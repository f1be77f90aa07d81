"""Benchmark of activation offload: lowpeak beside TRL, save_on_cpu and none, one model body."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.offload_rows import (
    BASELINE,
    NATIVE,
    OURS,
    ROWS,
    Helper,
    Moved,
    as_fields,
    make_helper,
    rows_for,
)
from lowpeak_bench.timing import synchronize
from lowpeak_bench.training_cases import CONFIGS

PLAIN = "-plain"
# A shorter step is run once more right before it is timed: see `timing.interleaved_medians`.
BRIEF_SECONDS = 0.5


@dataclass(frozen=True)
class Setting:
    """Tokens of the one sequence, and whether its layers are checkpointed."""

    tokens: int
    checkpointing: bool

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.tokens}" if self.checkpointing else f"{self.tokens}{PLAIN}"


@dataclass(frozen=True)
class OffloadResult:
    """One row of one setting.

    seconds is the median of step_seconds, forward and backward; overhead is what it is above that
    of "none", as a part of it. peak_bytes is the most that the allocator gave out in a timed step:
    weights, gradients and the sequence are in it. host_bytes is what lowpeak asked of the host,
    before torch's allocator rounds it. Of the last step: bytes_out, bytes_back and the part of the
    latter that was ready_in_time. gradient_norm is that of the first step.
    """

    tokens: int
    checkpointing: bool
    row: str
    seconds: float | None = None
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    overhead: float | None = None
    peak_bytes: int | None = None
    bytes_out: int | None = None
    bytes_back: int | None = None
    ready_in_time: float | None = None
    host_bytes: int | None = None
    gradient_norm: float | None = None
    explanation: str | None = None
    failure: str | None = None


class Bench:
    """A body and its sequence, and steps of it."""

    def __init__(self, setting: Setting, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        dtype = getattr(torch, options.dtype)
        self.body = build_body(options.config, dtype, self.device, options.attention)
        if setting.checkpointing:
            enable: Any = self.body.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        config: Any = self.body.config
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, setting.tokens)
        self._ids = torch.randint(config.vocab_size, shape, generator=generator, device=self.device)
        self._gradient = torch.randn(
            *shape, config.hidden_size, generator=generator, device=self.device, dtype=dtype
        )

    def step(self, helper: Helper) -> None:
        """Forward and backward; leaves gradients."""
        with helper.context:
            hidden = self.body(input_ids=self._ids, use_cache=False).last_hidden_state
            # that of the sum of the products: a loss of its own would save tensors too
            torch.autograd.backward(hidden, self._gradient)

    def seconds(self, helper: Helper) -> float:
        """How long a step takes, the device idle before and after.

        The peaks of both allocators begin again with it.
        """
        self.body.zero_grad(set_to_none=True)
        reset_peaks(self.device)
        synchronize(self.device)
        start = time.perf_counter()
        self.step(helper)
        synchronize(self.device)
        return time.perf_counter() - start

    def gradient_norm(self) -> float:
        """That of all parameters together."""
        found = [x.grad.float().norm() for x in self.body.parameters() if x.grad is not None]
        return float(torch.stack(found).norm())


class Row:
    """A helper and what its steps showed."""

    def __init__(self, name: str, bench: Bench, options: argparse.Namespace) -> None:
        self.name = name
        self._bench = bench
        self._options = options
        self._helper: Helper | None = None
        self._warm: list[float] = []
        self._timed: list[float] = []
        self._peaks: list[int] = []
        self._moved = Moved()
        self._norm: float | None = None
        self._failure: str | None = None

    @property
    def done(self) -> bool:
        """Whether it failed, or has been timed often enough."""
        return self._failure is not None or (
            self._is_warm and self._enough(self._timed, self._options.repeats)
        )

    def run(self) -> None:
        """One step more: a warm-up, or one that is timed. An error is a result."""
        try:
            self._run()
        except Exception as error:  # out of memory is a result; the table shows it
            self._failure = reason(error)
            self._helper = None
        if self._failure is not None:
            self._bench.body.zero_grad(set_to_none=True)
            release(self._bench.device)

    def result(self, setting: Setting) -> OffloadResult:
        """What there is up to now."""
        return OffloadResult(
            setting.tokens,
            setting.checkpointing,
            self.name,
            seconds=statistics.median(self._timed) if self._timed else None,
            step_seconds=list(self._timed),
            peak_bytes=max(self._peaks, default=None),
            gradient_norm=self._norm,
            failure=self._failure,
            **as_fields(self._moved),
        )

    def _enough(self, samples: list[float], most: int) -> bool:
        return len(samples) >= most or sum(samples) >= self._options.enough_seconds

    @property
    def _is_warm(self) -> bool:
        return self._enough(self._warm, self._options.warmup)

    def _run(self) -> None:
        bench = self._bench
        if self._helper is None:
            self._helper = make_helper(self.name, bench.body, bench.device, ours(self._options))
        if not self._is_warm:
            self._warm.append(bench.seconds(self._helper))
            self._norm = self._norm or bench.gradient_norm()
            return
        if self._warm[-1] < BRIEF_SECONDS:
            bench.seconds(self._helper)
        self._helper.reset()
        self._timed.append(bench.seconds(self._helper))
        self._moved = self._helper.moved()
        if bench.device.type == "cuda":
            self._peaks.append(torch.cuda.max_memory_allocated(bench.device))


def build_body(
    name: str, dtype: torch.dtype, device: torch.device, attention: str
) -> nn.Module | Any:
    """The layers of a Gemma 3 model without its head, random weights, seed 0, in train mode."""
    from transformers import AutoModel, Gemma3TextConfig

    from lowpeak.attention import register_attention

    if attention == "lowpeak":
        register_attention()
    auto_model: Any = AutoModel
    torch.manual_seed(0)
    with device:
        body = auto_model.from_config(
            Gemma3TextConfig(**CONFIGS[name]), dtype=dtype, attn_implementation=attention
        )
    return body.train()


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """The options of lowpeak's context that the command line names."""
    given = {
        "device_backend": options.device_backend,
        "min_bytes": options.min_bytes,
        "window_bytes": options.window_bytes,
        "keep_last": options.keep_last,
        "keep_bytes": options.keep_bytes,
    }
    return {name: value for name, value in given.items() if value is not None}


def reset_peaks(device: torch.device) -> None:
    """Begin the peaks of both allocators again."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.empty(1, pin_memory=True)  # an allocation takes back what other rows have returned
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_peak_host_memory_stats()


def release(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_setting(
    setting: Setting,
    options: argparse.Namespace,
    note: Callable[[list[OffloadResult]], None],
) -> list[OffloadResult]:
    """Run all rows of a setting in turn, each round beginning at another; `note` after each."""
    names = rows_for(setting.checkpointing, setting.tokens, options.rows)
    try:
        bench = Bench(setting, options)
    except Exception as error:  # out of memory is a result; the table shows it
        failed = [
            OffloadResult(setting.tokens, setting.checkpointing, name, failure=reason(error))
            for name in names
        ]
        note(failed)
        return failed
    rows = [Row(name, bench, options) for name in names]
    start = 0
    while not all(row.done for row in rows):
        for row in (*rows[start:], *rows[:start]):
            if not row.done:
                row.run()
                note(with_overheads([one.result(setting) for one in rows]))
        start = (start + 1) % len(rows)
    return with_overheads([row.result(setting) for row in rows])


def with_overheads(results: Sequence[OffloadResult]) -> list[OffloadResult]:
    """Give the rows of one setting their time above that of the step as it is."""
    plain = next((one.seconds for one in results if one.row == BASELINE), None)
    return [
        dataclasses.replace(one, overhead=one.seconds / plain - 1)
        if plain and one.seconds and one.row != BASELINE
        else one
        for one in results
    ]


def render_results(results: Sequence[OffloadResult]) -> str:
    """A line a row, and below the table why rows failed."""
    headers = ["tokens", "checkpoints", "row", "s a step", "overhead %", "peak GiB"]
    headers += ["out GiB", "back GiB", "ready %", "host GiB", "gradient norm"]
    rows = [
        [
            f"{one.tokens}",
            "yes" if one.checkpointing else "no",
            one.row,
            "failed" if one.failure is not None else table.number(one.seconds, 3),
            _percent(one.overhead),
            table.gibibytes(one.peak_bytes),
            table.gibibytes(one.bytes_out),
            table.gibibytes(one.bytes_back),
            _percent(one.ready_in_time),
            table.gibibytes(one.host_bytes),
            table.number(one.gradient_norm, 4),
        ]
        for one in results
    ]
    notes = "".join(f"- {one.tokens} {one.row}: {one.failure}\n" for one in results if one.failure)
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def _percent(part: float | None) -> str:
    return table.number(None if part is None else 100 * part, 1)


def parse_setting(text: str) -> Setting:
    """Read "8192" or "8192-plain", which is without checkpoints.

    Raises:
        argparse.ArgumentTypeError: where that is no number of tokens.
    """
    digits = text.removesuffix(PLAIN)
    if not digits.isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: write TOKENS or TOKENS{PLAIN}")
    return Setting(int(digits), not text.endswith(PLAIN))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="offload.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    settings = [parse_setting(name) for name in ("32768", "131072", "8192", f"8192{PLAIN}")]
    add = parser.add_argument
    add(
        "--settings",
        nargs="+",
        type=parse_setting,
        default=settings,
        help=f"TOKENS, or TOKENS{PLAIN} for layers without checkpoints",
    )
    add("--rows", nargs="+", choices=(*ROWS, *NATIVE), help="None takes those that tell something")
    add("--attention", default="lowpeak", help="of the body, for all rows")
    add("--config", choices=tuple(CONFIGS), default="gemma-3-1b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_cuda else "float32")
    add("--device", default="cuda" if on_cuda else "cpu")
    add("--repeats", type=int, default=5, help="most timed steps of a row")
    add("--warmup", type=int, default=2, help="most steps of a row before the timed ones")
    add("--enough-seconds", type=float, default=2.0, help="of a row's steps; then no more follow")
    add("--device-backend", choices=("auto", "torch", "native", "sim", "null"), help="of lowpeak")
    add("--min-bytes", type=int, help="of lowpeak")
    add("--window-bytes", type=table.parse_bytes, help="of lowpeak")
    add("--keep-last", type=int, help="of lowpeak")
    add("--keep-bytes", type=table.parse_bytes, help="of lowpeak")
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run all settings and print one table; 1 when lowpeak or the step as it is failed."""
    options = parser().parse_args(arguments)
    block = environment()
    finished: list[OffloadResult] = []

    def note(running: list[OffloadResult]) -> None:
        # After each step, so that a run cut short still shows what it had.
        if options.json is not None:
            _write_json(options, block, [*finished, *running])

    for setting in options.settings:
        finished += run_setting(setting, options, note)
        release(torch.device(options.device))
        for one in finished:
            if (one.tokens, one.checkpointing) == (setting.tokens, setting.checkpointing):
                stream.write(f"{json.dumps(dataclasses.asdict(one))}\n")
        stream.flush()
    title = f"{options.config} without its head, {options.dtype}, attention {options.attention}"
    stream.write(table.heading(title, stream))
    stream.write(render_results(finished))
    return int(any(one.failure and one.row in (BASELINE, *OURS, *NATIVE) for one in finished))


def _write_json(options: argparse.Namespace, block: Any, results: Sequence[OffloadResult]) -> None:
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["settings"] = [setting.name for setting in options.settings]
    document = {
        "benchmark": "offload",
        "environment": block,
        "settings": settings,
        "results": [dataclasses.asdict(one) for one in results],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
