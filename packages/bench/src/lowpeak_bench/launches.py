"""Launch shapes of the row kernels on a chunk of rows with all of the vocabulary."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lowpeak_bench import table
from lowpeak_bench.timing import interleaved_medians

KERNELS = ("fold", "gradient")


@dataclass(frozen=True)
class LaunchMeasurement:
    """One launch shape of one kernel; `terabytes` a second count what it reads and writes."""

    kernel: str
    launch: str
    milliseconds: float
    terabytes: float


def sweep_launches(
    kernel: str, rows: int, columns: int, dtype: torch.dtype, options: argparse.Namespace
) -> list[LaunchMeasurement]:
    """Time a kernel on normal logits [rows, columns], the fastest launch first."""
    device = torch.device(options.device)
    pitch = -(-columns // 8) * 8
    tile = torch.randn(rows, pitch, device=device, dtype=dtype)[:, :columns]
    targets = torch.zeros(rows, dtype=torch.int64, device=device)
    works = _folds(tile, targets, options) if kernel == "fold" else _gradients(tile, targets)
    names, runs = zip(*works, strict=True)
    times = interleaved_medians(runs, device, repeats=options.repeats, warmup=options.warmup)
    moved = tile.numel() * tile.element_size() * (1 if kernel == "fold" else 2)
    found = [
        LaunchMeasurement(kernel, name, elapsed, moved / elapsed * 1e-9)
        for name, elapsed in zip(names, times, strict=True)
    ]
    return sorted(found, key=lambda one: one.milliseconds)


def _folds(
    tile: torch.Tensor, targets: torch.Tensor, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], None]]]:
    from lowpeak.kernels.lm_head_fold import Folded, FoldLaunch, RowStatistics, fold_tile_triton
    from lowpeak.kernels.logit_transform import TileTransform

    folded = Folded(entropy="entropy" in options.outputs, top1="is_top1" in options.outputs)
    sums = RowStatistics.empty(tile.size(0), folded, torch.float32, tile.device)
    fixed = (tile, None, targets, None, sums, 0, TileTransform(), folded)
    shapes = itertools.product((1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16), (4, 8))
    for launch in (FoldLaunch(group, block, warps) for block, warps, group in shapes):
        if 8 <= launch.block // (32 * launch.warps) <= 64:
            yield str(launch), functools.partial(fold_tile_triton, *fixed, launch)


def _gradients(
    tile: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[str, Callable[[], None]]]:
    from lowpeak.kernels.lm_head_gradient import (
        GradientLaunch,
        RowCoefficients,
        gradient_tile_triton,
    )
    from lowpeak.kernels.logit_transform import TileTransform

    ones = torch.ones(tile.size(0), device=tile.device)
    rows = RowCoefficients(8 * ones, ones, ones, 0 * ones, ones, ones, None, None, None)
    fixed = (tile, None, targets, None, rows, 0, TileTransform(), tile)
    for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)):
        if 4 <= block // (32 * warps) <= 64:
            launch = GradientLaunch(block, warps)
            yield str(launch), functools.partial(gradient_tile_triton, *fixed, launch=launch)


def render_launches(results: Sequence[LaunchMeasurement]) -> str:
    """Render one kernel on one chunk."""
    rows = [
        [one.launch, table.number(one.milliseconds, 3), table.number(one.terabytes, 2)]
        for one in results
    ]
    return table.render(["launch", "ms", "TB/s"], rows)
