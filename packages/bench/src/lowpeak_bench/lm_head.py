"""Benchmark of the LM head alone: loss and gradients of -mean(log p(target)).

All implementations run in one process on the same inputs, in turn, so that their ratios hold on
any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.lm_head_reference import (
    HeadShape,
    Reference,
    float32_reference,
    make_problem,
    with_adapter,
)
from lowpeak_bench.peers import (
    Evaluate,
    Evaluation,
    HeadImplementation,
    HeadProblem,
    baselines_and_peers,
    lowpeak_variants,
    matrix_products,
    peers_with_adapter,
)
from lowpeak_bench.timing import interleaved_medians, peak_bytes

FLOOR = "bare matrix products"


SHAPES = (
    HeadShape("gemma-3-1b", 262144, 1152),
    HeadShape("qwen3-0.6b", 151936, 1024),
    HeadShape("llama-3-8b", 128256, 4096),
)


@dataclass(frozen=True)
class Measurement:
    """One implementation on one head.

    peak_bytes counts above the inputs, extra_bytes above the inputs and the returned gradients.
    Errors are against float32: |loss|, max |log p|, relative Frobenius norm of the gradients of
    hidden states, weight and LoRA factors. None means not known.
    """

    shape: str
    tokens: int
    head: str
    implementation: str
    milliseconds: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None
    loss_error: float | None = None
    log_prob_error: float | None = None
    hidden_gradient_error: float | None = None
    weight_gradient_error: float | None = None
    adapter_a_gradient_error: float | None = None
    adapter_b_gradient_error: float | None = None
    failure: str | None = None


def differentiate(evaluate: Evaluate, problem: HeadProblem) -> tuple[Evaluation, list[Tensor]]:
    """Return the loss and its gradients in the problem's leaves, dH first."""
    evaluation = evaluate(problem)
    wanted = list(problem.leaves.values())
    return evaluation, list(torch.autograd.grad(evaluation.loss, wanted))


def measure_head(
    problem: HeadProblem,
    implementations: Sequence[HeadImplementation],
    blank: Measurement,
    reference: Reference | None,
    *,
    repeats: int,
    warmup: int,
) -> list[Measurement]:
    """Measure all implementations on one problem; one that fails is kept, with its reason."""
    device = problem.hidden.device
    runs: list[Callable[[], object]] = [lambda: matrix_products(problem)]
    results = [dataclasses.replace(blank, implementation=FLOOR)]
    failures: list[Measurement] = []
    for implementation in implementations:
        result = dataclasses.replace(blank, implementation=implementation.name)
        try:
            evaluate = implementation.load()
            evaluation, gradients = differentiate(evaluate, problem)
            named = dict(zip(problem.leaves, gradients, strict=True))
            result = _errors(result, evaluation, named, reference)
            del evaluation, gradients, named
            result = _memory(result, evaluate, problem)
        except Exception as error:  # a peer may fail in any way; the table shows how
            failures.append(dataclasses.replace(result, failure=reason(error)))
            _release(device)
            continue
        runs.append(_run(evaluate, problem))
        results.append(result)
    times = interleaved_medians(runs, device, repeats=repeats, warmup=warmup)
    timed = [
        dataclasses.replace(result, milliseconds=elapsed)
        for result, elapsed in zip(results, times, strict=True)
    ]
    return timed + failures


def _run(evaluate: Evaluate, problem: HeadProblem) -> Callable[[], object]:
    return lambda: differentiate(evaluate, problem)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory(result: Measurement, evaluate: Evaluate, problem: HeadProblem) -> Measurement:
    peak = peak_bytes(lambda: differentiate(evaluate, problem), problem.hidden.device)
    if peak is None:
        return result
    leaves = problem.leaves.values()
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
    return dataclasses.replace(result, peak_bytes=peak, extra_bytes=peak - gradients)


def _errors(
    result: Measurement,
    evaluation: Evaluation,
    gradients: Mapping[str, Tensor],
    reference: Reference | None,
) -> Measurement:
    if reference is None:
        return result
    log_prob_error = None
    if evaluation.log_probs is not None:
        difference = evaluation.log_probs.detach().float() - reference.log_probs
        log_prob_error = difference.abs().max().item()
    errors: dict[str, Any] = {
        f"{name}_gradient_error": _relative(gradient, reference.gradients[name])
        for name, gradient in gradients.items()
    }
    return dataclasses.replace(
        result,
        loss_error=abs(evaluation.loss.item() + reference.log_probs.mean().item()),
        log_prob_error=log_prob_error,
        **errors,
    )


def _relative(gradient: Tensor, expected: Tensor) -> float:
    return float((gradient.float() - expected).norm() / expected.norm())


def run_shape(shape: HeadShape, options: argparse.Namespace) -> list[Measurement]:
    """Measure all chosen implementations on one shape and the chosen heads."""
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    trained = make_problem(shape, options.tokens, dtype, device, options.weight_std)
    plain = set(options.heads) - {"lora"}
    reference = float32_reference(trained) if options.errors and plain else None
    results: list[Measurement] = []
    for head in options.heads:
        problem, right = trained, reference
        if head == "frozen":
            problem = trained._replace(weight=trained.weight.detach())
        elif head == "lora":
            problem = with_adapter(trained, options.lora_rank)
            right = float32_reference(problem) if options.errors else None
        blank = Measurement(shape.name, options.tokens, head, "")
        results += measure_head(
            problem,
            choose(options, head),
            blank,
            right,
            repeats=options.repeats,
            warmup=options.warmup,
        )
    return results


def choose(options: argparse.Namespace, head: str) -> list[HeadImplementation]:
    """List the implementations of a head whose name contains one of --only, or all of them."""
    scratch_sizes: list[int | None] = [None, *options.scratch_bytes]
    expected_sizes: list[int | None] = [None, *options.expected_bytes]
    found = peers_with_adapter() if head == "lora" else baselines_and_peers()
    found += lowpeak_variants(scratch_sizes, expected_sizes, options.backends)
    if not options.only:
        return found
    return [one for one in found if any(part in one.name for part in options.only)]


def render_results(results: Sequence[Measurement], heads: Sequence[str], errors: bool) -> str:
    """Render one shape as a table: time and memory a head, errors of the first head if asked."""
    headers = ["implementation"]
    for head in heads:
        headers += [f"{head} ms", f"{head} MiB"]
    columns = _error_columns(heads[0]) if errors else {}
    names = list(dict.fromkeys(result.implementation for result in results))
    found = {(result.implementation, result.head): result for result in results}
    rows = []
    for name in names:
        row = [name]
        for head in heads:
            result = found.get((name, head), Measurement("", 0, head, name))
            row.append("failed" if result.failure else table.number(result.milliseconds))
            row.append(table.mebibytes(result.extra_bytes))
        first = dataclasses.asdict(found.get((name, heads[0]), Measurement("", 0, "", name)))
        row += [table.scientific(first[field]) for field in columns.values()]
        rows.append(row)
    headers += columns
    # A peer mostly fails on both heads alike: say it once.
    failed = [(result.implementation, result.failure) for result in results if result.failure]
    notes = "".join(f"- {name}: {failure}\n" for name, failure in dict.fromkeys(failed))
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def _error_columns(head: str) -> dict[str, str]:
    """Fields of the errors that are shown of a head, by their headings."""
    columns = {"log p max error": "log_prob_error", "dH error": "hidden_gradient_error"}
    if head == "lora":
        columns |= {"dA error": "adapter_a_gradient_error", "dB error": "adapter_b_gradient_error"}
    else:
        columns["dW error"] = "weight_gradient_error"
    return columns


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="lm_head.py", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--shapes", nargs="+", default=[shape.name for shape in SHAPES], metavar="NAME|VxH")
    add("--tokens", type=int, default=8192)
    add("--heads", nargs="+", choices=("trained", "frozen", "lora"), default=["trained", "frozen"])
    add("--lora-rank", type=int, default=16, help="of the adapter on the frozen head of 'lora'")
    add("--only", nargs="+", default=[], help="parts of the names of what to run; default all")
    add("--scratch-bytes", nargs="+", type=table.parse_bytes, default=[], help="more lowpeak rows")
    add(
        "--expected-bytes",
        nargs="+",
        type=table.parse_bytes,
        default=[],
        help="more rows that know the gradient beforehand; the bytes hold a float32 dW too",
    )
    add("--backends", nargs="+", default=["auto"], help="lowpeak backends: auto triton torch")
    add("--weight-std", type=float, default=0.02)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default=device)
    add("--repeats", type=int, default=7)
    add("--warmup", type=int, default=2)
    add("--errors", action="store_true", help="errors against a float32 reference")
    add("--json", type=Path, help="write results and environment here")
    add("--plot", type=Path, help="write a PNG of time against memory here")
    return parser


def find_shape(text: str) -> HeadShape:
    """Return a shape by its name or from "VxH"."""
    for shape in SHAPES:
        if shape.name == text:
            return shape
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        names = ", ".join(shape.name for shape in SHAPES)
        raise ValueError(f"shape is {text!r}; give one of {names}, or VxH such as 32000x2048")
    return HeadShape(text, int(parts[0]), int(parts[1]))


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run the benchmark, print a table for each shape, write what was asked for.

    Returns 1 when a row of lowpeak failed. Peers may fail; the table says why.
    """
    options = parser().parse_args(arguments)
    results: list[Measurement] = []
    for shape in [find_shape(text) for text in options.shapes]:
        found = run_shape(shape, options)
        results += found
        title = f"{shape.name}: V={shape.vocabulary} H={shape.hidden} N={options.tokens}"
        stream.write(table.heading(f"{title} {options.dtype}", stream))
        stream.write(render_results(found, options.heads, options.errors))
        stream.flush()
        _release(torch.device(options.device))
    if options.json is not None:
        _write_json(options, results)
    if options.plot is not None:
        from lowpeak_bench.plots import plot_lm_head

        plot_lm_head(results, options.plot)
    return int(any(one.failure and one.implementation.startswith("lowpeak") for one in results))


def _write_json(options: argparse.Namespace, results: Sequence[Measurement]) -> None:
    kept = ("tokens", "weight_std", "dtype", "device", "repeats", "warmup", "lora_rank")
    document = {
        "benchmark": "lm_head",
        "environment": environment(),
        "settings": {name: getattr(options, name) for name in kept},
        "results": [dataclasses.asdict(result) for result in results],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
