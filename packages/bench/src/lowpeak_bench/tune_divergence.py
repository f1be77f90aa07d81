"""Sweep of the divergence kernels' launch shapes, and of the groups of tokens of its one pass."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from lowpeak_bench import table
from lowpeak_bench.divergence import differentiate
from lowpeak_bench.divergence_cases import DIVERGENCES, PairProblem, load_lowpeak, make_pair
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.lm_head import find_shape
from lowpeak_bench.timing import interleaved_medians, peak_bytes

KERNELS = ("fold", "mixture", "gradient")
Run = Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """One setting of a kernel (block, warps, group) or of a plan (rows, columns), and its time.

    The first of each sweep, called "default", is lowpeak's own choice.
    """

    sweep: str
    divergence: str
    setting: str
    milliseconds: float | None = None
    gigabytes_per_second: float | None = None
    peak_bytes: int | None = None
    failure: str | None = None


def kernel_launch(
    kernel: str, divergence: str, tiles: tuple[Tensor, Tensor], out: Tensor
) -> tuple[Run, int]:
    """A launch of a kernel on float32 tiles of both heads, and the bytes it reads and writes."""
    from lowpeak.kernels.divergence_fold import (
        Divergence,
        HeadTile,
        PairStatistics,
        fold_pair_triton,
    )
    from lowpeak.kernels.divergence_gradient import divergence_gradient_triton
    from lowpeak.kernels.divergence_mixture import PairNormalizers, mixture_tile_triton
    from lowpeak.kernels.logit_transform import TileTransform

    student, teacher = (HeadTile(tile, None, None, TileTransform()) for tile in tiles)
    rows, device, beta = out.size(0), out.device, DIVERGENCES[divergence]
    kinds = {0.0: Divergence.FORWARD_KL, 1.0: Divergence.REVERSE_KL}
    kind = kinds.get(beta, Divergence.MIXTURE)
    zeros = torch.zeros(rows, device=device)
    read = sum(tile.numel() * tile.element_size() for tile in tiles)
    if kernel == "fold":
        statistics = PairStatistics.empty(rows, torch.float32, device)
        return functools.partial(fold_pair_triton, student, teacher, statistics, kind), read
    normalizers = PairNormalizers(*(torch.full((rows,), 12.0, device=device) for _ in range(4)))
    if kernel == "mixture":
        sums = (zeros, zeros.clone())
        run = functools.partial(mixture_tile_triton, student, teacher, normalizers, beta, *sums)
        return run, read
    run = functools.partial(
        divergence_gradient_triton, student, teacher, normalizers, zeros + 1, zeros, kind, beta, out
    )
    return run, read + out.numel() * out.element_size()


def launch_settings(kernel: str, options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """(block, warps, group) to try."""
    for block in options.blocks:
        for warps in options.warps:
            for group in options.groups if kernel == "fold" else [1]:
                if block % group == 0:
                    yield block, warps, group


def sweep_kernel(kernel: str, divergence: str, options: argparse.Namespace) -> list[Setting]:
    """Time one kernel over its launch shapes, interleaved, the fastest first."""
    from lowpeak.kernels.divergence_launch import DivergenceLaunch

    device = torch.device(options.device)
    size = (options.rows[0], options.columns[0])
    tiles = torch.randn(size, device=device), torch.randn(size, device=device)
    out = torch.empty(size, dtype=torch.bfloat16, device=device)
    launch, moved = kernel_launch(kernel, divergence, tiles, out)

    runs: dict[str, Run] = {"default": launch}
    for block, warps, group in launch_settings(kernel, options):
        shape = DivergenceLaunch(block, warps, group)
        runs[f"{block} x {warps} x {group}"] = functools.partial(launch, launch=shape)
    blank = Setting(f"kernel {kernel}", divergence, "")
    return [
        dataclasses.replace(
            one,
            gigabytes_per_second=moved / one.milliseconds / 1e6 if one.milliseconds else None,
        )
        for one in _timed(blank, runs, device, options)
    ]


def sweep_plan(
    head: str, divergence: str, pair: PairProblem, options: argparse.Namespace
) -> list[Setting]:
    """Time forward and backward over the groups of tokens and blocks of columns of the one pass."""
    from lowpeak.lm_head.divergence_plan import override_one_pass

    problem = pair._replace(beta=DIVERGENCES[divergence])
    if head == "frozen":
        problem = problem._replace(weight=problem.weight.detach())
    evaluate = load_lowpeak(True, None, options.backend)

    def run(rows: int, columns: int) -> object:
        with override_one_pass(rows, columns):
            return differentiate(evaluate, problem)

    two_passes = load_lowpeak(False, None if head == "trained" else 2**27, options.backend)
    runs: dict[str, Run] = {
        "default": functools.partial(differentiate, evaluate, problem),
        "two passes": functools.partial(differentiate, two_passes, problem),
    }
    for rows in options.rows:
        for columns in options.columns:
            runs[f"{rows} x {columns}"] = functools.partial(run, rows, columns)
    return _timed(Setting(f"plan, {head} head", divergence, ""), runs, pair.hidden.device, options)


def _timed(
    blank: Setting, runs: dict[str, Run], device: torch.device, options: argparse.Namespace
) -> list[Setting]:
    served: list[Run] = []
    settings: list[Setting] = []
    failures: list[Setting] = []
    for name, run in runs.items():
        setting = dataclasses.replace(blank, setting=name)
        try:
            run()
            peak = peak_bytes(run, device)
        except Exception as error:  # a shape that a kernel or the memory refuses is a result
            failures.append(dataclasses.replace(setting, failure=reason(error)))
            continue
        served.append(run)
        settings.append(dataclasses.replace(setting, peak_bytes=peak))
    times = interleaved_medians(served, device, repeats=options.repeats, warmup=options.warmup)
    timed = [
        dataclasses.replace(setting, milliseconds=elapsed)
        for setting, elapsed in zip(settings, times, strict=True)
    ]
    return sorted(timed, key=lambda setting: setting.milliseconds or 0.0) + failures


def render_settings(settings: Sequence[Setting]) -> str:
    """Render one sweep."""
    rows = [
        [
            one.setting,
            "failed" if one.failure else table.number(one.milliseconds, 3),
            table.number(one.gigabytes_per_second, 0),
            table.mebibytes(one.peak_bytes),
        ]
        for one in settings
    ]
    return table.render(["setting", "ms", "GB/s", "peak MiB"], rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="tune_divergence.py", description=__doc__)
    add = parser.add_argument
    add("--sweeps", nargs="+", choices=("kernels", "plan"), default=["kernels", "plan"])
    add("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    add("--divergences", nargs="+", choices=tuple(DIVERGENCES), default=["forward-kl", "jsd"])
    add("--heads", nargs="+", choices=("trained", "frozen"), default=["trained", "frozen"])
    add("--shape", default="gemma-3-1b", metavar="NAME|VxH")
    add("--tokens", type=int, default=8192)
    add("--rows", nargs="+", type=int, default=[512, 256, 1024, 2048], help="kernels: the first")
    add("--columns", nargs="+", type=int, default=[65536, 16384, 32768, 131072], help="as --rows")
    add("--blocks", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    add("--warps", nargs="+", type=int, default=[2, 4, 8])
    add("--groups", nargs="+", type=int, default=[1, 4, 8, 16])
    add("--backend", default="auto", help="lowpeak's backend: auto triton torch")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=5)
    add("--warmup", type=int, default=1)
    add("--json", type=Path, help="write results and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run the sweeps that were asked for; print a table for each."""
    options = parser().parse_args(arguments)
    results: list[Setting] = []

    def show(found: list[Setting]) -> None:
        results.extend(found)
        stream.write(table.heading(f"{found[0].sweep}, {found[0].divergence}", stream))
        stream.write(render_settings(found))
        stream.flush()

    for divergence in options.divergences:
        if "kernels" in options.sweeps:
            for kernel in options.kernels:
                if kernel != "mixture" or divergence == "jsd":
                    show(sweep_kernel(kernel, divergence, options))
        if "plan" in options.sweeps:
            dtype, device = getattr(torch, options.dtype), torch.device(options.device)
            pair = make_pair(find_shape(options.shape), options.tokens, dtype, device, 0.05)
            for head in options.heads:
                show(sweep_plan(head, divergence, pair, options))
    if options.json is not None:
        document = {
            "benchmark": "tune_divergence",
            "environment": environment(),
            "settings": {"shape": options.shape, "tokens": options.tokens, "dtype": options.dtype},
            "results": [dataclasses.asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0
