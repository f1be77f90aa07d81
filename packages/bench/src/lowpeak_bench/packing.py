"""Benchmark of packed SFT: many documents of ragged lengths, stock TRL beside lowpeak."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.step_clock import Schedule, step_clock
from lowpeak_bench.training_cases import CONFIGS, build_model
from lowpeak_bench.training_data import build_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

SIDES = {"trl": "trl", "lowpeak": "lowpeak_trainers"}


@dataclass(frozen=True)
class PackedResult:
    """One side with one batch size.

    seconds is the median of a step (forward, backward, clipping, optimizer); tokens_per_second are
    those of documents, not of padding. setup_seconds is what the trainer's construction took, in
    which the documents are packed into packed_rows rows, `fill` of whose room is documents.
    """

    side: str
    rows: int
    setup_seconds: float | None = None
    packed_rows: int | None = None
    fill: float | None = None
    seconds: float | None = None
    timed_steps: int = 0
    tokens_per_second: float | None = None
    ratio_to_trl: float | None = None
    peak_bytes: int | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    failure: str | None = None


def documents(count: int, shortest: int, longest: int, vocabulary: int) -> Dataset:
    """Documents of random ids, their lengths log-uniform from `shortest` to `longest`, seed 0."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(shortest), np.log(longest), count)).round()
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    ids = generator.integers(4, vocabulary, offsets[-1], dtype=np.int64)
    return Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), ids)}))


def run_side(side: str, rows: int, data: Dataset, options: argparse.Namespace) -> PackedResult:
    """Pack and train on one side, and free everything it held."""
    device = torch.device(options.device)
    try:
        return _train(side, rows, data, options, device)
    except Exception as error:  # out of memory is a result; the table shows it
        return PackedResult(side, rows, failure=reason(error))
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _train(
    side: str, rows: int, data: Dataset, options: argparse.Namespace, device: torch.device
) -> PackedResult:
    schedule = Schedule(options.warmup, options.repeats, options.enough_seconds)
    clock = step_clock(device, schedule)
    model = build_model(options.config, getattr(torch, options.dtype), device)
    module = importlib.import_module(SIDES[side])
    with tempfile.TemporaryDirectory() as output:
        arguments = module.SFTConfig(
            output_dir=output,
            max_length=options.max_length,
            packing=True,
            packing_strategy=options.strategy,
            per_device_train_batch_size=rows,
            max_steps=schedule.steps,
            optim="adamw_torch_fused",
            bf16=model.dtype == torch.bfloat16,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            seed=0,
        )
        start = time.perf_counter()
        trainer = module.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=build_tokenizer(model.config.vocab_size),
            callbacks=[clock],
        )
        setup = time.perf_counter() - start
        trainer.train()
    tokens, count = total_tokens(trainer.train_dataset), len(trainer.train_dataset)
    seconds = statistics.median(clock.seconds)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return PackedResult(
        side,
        rows,
        setup_seconds=setup,
        packed_rows=count,
        fill=tokens / (count * options.max_length),
        seconds=seconds,
        timed_steps=len(clock.seconds),
        tokens_per_second=tokens / count * rows / seconds,
        peak_bytes=max(clock.peaks, default=None),
        losses=[float(entry["loss"]) for entry in logs],
    )


def total_tokens(data: Dataset) -> int:
    """The tokens of all rows."""
    import pyarrow.compute

    lengths = pyarrow.compute.list_value_length(data.with_format("arrow")[:]["input_ids"])
    return int(pyarrow.compute.sum(lengths).as_py())


def with_ratios(results: Sequence[PackedResult]) -> list[PackedResult]:
    """Give each row its tokens per second as a multiple of TRL's with the same batch."""
    stock = {one.rows: one.tokens_per_second for one in results if one.side == "trl"}
    return [
        dataclasses.replace(one, ratio_to_trl=one.tokens_per_second / theirs)
        if one.side != "trl" and one.tokens_per_second and (theirs := stock.get(one.rows))
        else one
        for one in results
    ]


def render_results(results: Sequence[PackedResult]) -> str:
    """A row a side and batch size."""
    headers = ["rows", "side", "setup s", "packed rows", "fill", "s a step", "tokens / s", "x TRL"]
    headers += ["peak GiB", "first loss"]
    rows = [
        [
            f"{one.rows}",
            one.side,
            table.number(one.setup_seconds, 1),
            "-" if one.packed_rows is None else f"{one.packed_rows}",
            table.number(one.fill, 4),
            "failed" if one.failure is not None else table.number(one.seconds, 3),
            table.number(one.tokens_per_second, 0),
            table.number(one.ratio_to_trl, 2),
            table.gibibytes(one.peak_bytes),
            table.number(one.losses[0] if one.losses else None, 5),
        ]
        for one in results
    ]
    notes = "".join(f"- {one.rows} x {one.side}: {one.failure}\n" for one in results if one.failure)
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="packing.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    add("--documents", type=int, default=20_000)
    add("--shortest", type=int, default=64, help="tokens of the shortest document")
    add("--max-length", type=int, default=8192, help="tokens of a packed row, and of a document")
    add("--strategy", choices=("bfd", "bfd_split", "wrapped"), default="bfd")
    add("--rows", nargs="+", type=int, default=[8], help="packed rows of a batch; TRL's default: 8")
    add("--config", choices=tuple(CONFIGS), default="gemma-3-1b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_cuda else "float32")
    add("--device", default="cuda" if on_cuda else "cpu")
    add("--repeats", type=int, default=3, help="most timed steps")
    add("--enough-seconds", type=float, default=10.0, help="of timed steps; then no more follow")
    add("--warmup", type=int, default=1, help="steps before the timed ones")
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run all sides and print one table; 1 when lowpeak failed."""
    from datasets import disable_progress_bars

    options = parser().parse_args(arguments)
    disable_progress_bars()
    vocabulary = CONFIGS[options.config]["vocab_size"]
    data = documents(options.documents, options.shortest, options.max_length, vocabulary)
    results: list[PackedResult] = []
    for rows in options.rows:
        for side in options.sides:
            results = with_ratios([*results, run_side(side, rows, data, options)])
            # A line and the JSON after each, so that a run cut short still shows what it had.
            stream.write(f"{json.dumps(dataclasses.asdict(results[-1]))}\n")
            stream.flush()
            if options.json is not None:
                _write_json(options, total_tokens(data), results)
    title = f"{options.config}, {options.documents} documents, {total_tokens(data):,} tokens"
    stream.write(table.heading(title, stream))
    stream.write(render_results(results))
    return int(any(one.failure and one.side != "trl" for one in results))


def _write_json(options: argparse.Namespace, tokens: int, results: Sequence[PackedResult]) -> None:
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    document = {
        "benchmark": "packing",
        "environment": environment(),
        "settings": settings,
        "document_tokens": tokens,
        "results": [dataclasses.asdict(one) for one in results],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
