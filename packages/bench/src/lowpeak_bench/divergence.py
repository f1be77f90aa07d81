"""Benchmark of a distillation loss: the mean divergence of two heads, and its gradients.

All implementations run in one process on the same inputs, in turn, so that their ratios hold on
any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from lowpeak_bench import table
from lowpeak_bench.divergence_cases import (
    DIVERGENCES,
    Evaluate,
    PairImplementation,
    PairProblem,
    divergence_of_logits,
    implementations,
    make_pair,
    matrix_products,
)
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.lm_head import FLOOR, find_shape
from lowpeak_bench.timing import interleaved_medians, peak_bytes


@dataclass(frozen=True)
class DivergenceMeasurement:
    """One implementation of one divergence; `*_bytes` and errors as in the LM head's benchmark."""

    shape: str
    tokens: int
    divergence: str
    head: str
    implementation: str
    milliseconds: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None
    time_to_trl: float | None = None
    loss_error: float | None = None
    hidden_gradient_error: float | None = None
    weight_gradient_error: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class DivergenceReference:
    """Mean divergence and its gradients dH [N, H], dW [V, H] in float32."""

    loss: float
    gradients: tuple[Tensor, Tensor]


def float32_reference(problem: PairProblem, rows: int = 512) -> DivergenceReference:
    """Compute the mean divergence and its gradients in float32, `rows` tokens at a time."""
    hidden, weight, teacher_hidden, teacher_weight = (x.detach().float() for x in problem[:4])
    total, tokens = 0.0, hidden.size(0)
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        logits = (hidden[part] @ weight.t()).requires_grad_()
        teacher = teacher_hidden[part] @ teacher_weight.t()
        value = divergence_of_logits(logits, teacher, problem.beta).sum() / tokens
        (gradient,) = torch.autograd.grad(value, logits)
        total += value.item()
        hidden_gradient[part] = gradient @ weight
        weight_gradient.addmm_(gradient.t(), hidden[part])
    return DivergenceReference(total, (hidden_gradient, weight_gradient))


def differentiate(evaluate: Evaluate, problem: PairProblem) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its gradients: dH and, where the weight is trained, dW."""
    loss = evaluate(problem)
    return loss, list(torch.autograd.grad(loss, problem.leaves))


def measure_pair(
    problem: PairProblem,
    candidates: Sequence[PairImplementation],
    blank: DivergenceMeasurement,
    reference: DivergenceReference | None,
    *,
    repeats: int,
    warmup: int,
) -> list[DivergenceMeasurement]:
    """Measure all implementations on one problem; one that fails is kept, with its reason."""
    device = problem.hidden.device
    runs: list[Callable[[], object]] = [functools.partial(matrix_products, problem)]
    results = [dataclasses.replace(blank, implementation=FLOOR)]
    failures: list[DivergenceMeasurement] = []
    for candidate in candidates:
        result = dataclasses.replace(blank, implementation=candidate.name)
        try:
            evaluate = candidate.load()
            loss, gradients = differentiate(evaluate, problem)
            if reference is not None and candidate.exact:
                result = _errors(result, loss, gradients, reference)
            del loss, gradients
            result = _memory(result, evaluate, problem)
        except Exception as error:  # a peer may fail in any way; the table shows how
            failures.append(dataclasses.replace(result, failure=reason(error)))
            _release(device)
            continue
        runs.append(functools.partial(differentiate, evaluate, problem))
        results.append(result)
    times = interleaved_medians(runs, device, repeats=repeats, warmup=warmup)
    of_trl = next(
        (t for one, t in zip(results, times, strict=True) if one.implementation == "TRL"), None
    )
    timed = [
        dataclasses.replace(
            result, milliseconds=elapsed, time_to_trl=None if of_trl is None else elapsed / of_trl
        )
        for result, elapsed in zip(results, times, strict=True)
    ]
    return timed + failures


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _memory(
    result: DivergenceMeasurement, evaluate: Evaluate, problem: PairProblem
) -> DivergenceMeasurement:
    peak = peak_bytes(lambda: differentiate(evaluate, problem), problem.hidden.device)
    if peak is None:
        return result
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in problem.leaves)
    return dataclasses.replace(result, peak_bytes=peak, extra_bytes=peak - gradients)


def _errors(
    result: DivergenceMeasurement,
    loss: Tensor,
    gradients: Sequence[Tensor],
    reference: DivergenceReference,
) -> DivergenceMeasurement:
    errors = [
        float((found.float() - true).norm() / true.norm())
        for found, true in zip(gradients, reference.gradients, strict=False)
    ]
    return dataclasses.replace(
        result,
        loss_error=abs(loss.item() - reference.loss),
        hidden_gradient_error=errors[0],
        weight_gradient_error=errors[1] if len(errors) > 1 else None,
    )


def render_results(results: Sequence[DivergenceMeasurement], errors: bool) -> str:
    """Render one divergence and head as a table."""
    headers = ["implementation", "ms", "/ TRL", "MiB"]
    headers += ["loss error", "dH error", "dW error"] if errors else []
    rows = []
    for result in results:
        row = [
            result.implementation,
            "failed" if result.failure else table.number(result.milliseconds),
            table.number(result.time_to_trl, 2),
            table.mebibytes(result.extra_bytes),
        ]
        if errors:
            found = (
                result.loss_error,
                result.hidden_gradient_error,
                result.weight_gradient_error,
            )
            row += [table.scientific(error) for error in found]
        rows.append(row)
    failed = [f"- {one.implementation}: {one.failure}\n" for one in results if one.failure]
    return table.render(headers, rows) + ("\n" + "".join(failed) if failed else "")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="divergence.py", description=__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=["gemma-3-1b"], metavar="NAME|VxH")
    add("--tokens", nargs="+", type=int, default=[4096, 8192])
    add("--divergences", nargs="+", choices=tuple(DIVERGENCES), default=list(DIVERGENCES))
    add("--heads", nargs="+", choices=("trained", "frozen"), default=["trained", "frozen"])
    add("--only", nargs="+", default=[], help="parts of the names of what to run; default all")
    add("--scratch-bytes", nargs="+", type=table.parse_bytes, default=[], help="more lowpeak rows")
    add("--top-k", type=int, default=64, help="tokens of the teacher's table")
    add("--backend", default="auto", help="lowpeak's backend: auto triton torch")
    add("--weight-std", type=float, default=0.05)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=1)
    add("--errors", action="store_true", help="errors against a float32 reference")
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run the benchmark, print a table for each divergence and head, write what was asked for.

    Returns 1 when a row of lowpeak failed. Others may fail; the table says why.
    """
    options = parser().parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    candidates = implementations([None, *options.scratch_bytes], options.top_k, options.backend)
    if options.only:
        candidates = [one for one in candidates if any(part in one.name for part in options.only)]
    results: list[DivergenceMeasurement] = []
    for shape in [find_shape(text) for text in options.shapes]:
        for tokens in options.tokens:
            pair = make_pair(shape, tokens, dtype, device, options.weight_std)
            for name in options.divergences:
                trained = pair._replace(beta=DIVERGENCES[name])
                reference = float32_reference(trained) if options.errors else None
                for head in options.heads:
                    problem = trained
                    if head == "frozen":
                        problem = trained._replace(weight=trained.weight.detach())
                    found = measure_pair(
                        problem,
                        candidates,
                        DivergenceMeasurement(shape.name, tokens, name, head, ""),
                        reference,
                        repeats=options.repeats,
                        warmup=options.warmup,
                    )
                    results += found
                    title = f"{shape.name}, {tokens} tokens, {name}, {head} head, {options.dtype}"
                    stream.write(table.heading(title, stream))
                    stream.write(render_results(found, options.errors))
                    stream.flush()
                    _release(device)
    if options.json is not None:
        kept = ("tokens", "weight_std", "dtype", "device", "repeats", "warmup", "top_k")
        document = {
            "benchmark": "divergence",
            "environment": environment(),
            "settings": {name: getattr(options, name) for name in kept},
            "results": [dataclasses.asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(one.failure and one.implementation.startswith("lowpeak") for one in results))
