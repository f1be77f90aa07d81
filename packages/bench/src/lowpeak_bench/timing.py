"""Time and memory of callables on one device: interleaved, warmed up, median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Work = Callable[[], Any]


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a CUDA device; on the CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Work, device: torch.device) -> float:
    """Run work once and return how long it took.

    On CUDA between two events, so that the host's launch overhead counts only where the device
    waits for it; on the CPU by the monotonic clock.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def interleaved_medians(
    works: Sequence[Work], device: torch.device, *, repeats: int, warmup: int
) -> list[float]:
    """Return the median milliseconds of each work.

    Every round takes every work in turn and starts at another one, so that clock and temperature
    drift hits all alike. A work is run once more right before it is timed: after a neighbour that
    draws little power an H200 is clocked higher for a while, which gave one row up to 9 %.
    `warmup` rounds come first and are not counted.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least one round must be measured")
    samples: list[list[float]] = [[] for _ in works]
    for round_index in range(warmup + repeats):
        for step in range(len(works)):
            index = (round_index + step) % len(works)
            works[index]()
            elapsed = milliseconds(works[index], device)
            if round_index >= warmup:
                samples[index].append(elapsed)
    return [statistics.median(sample) for sample in samples]


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Return the bytes the allocator held at most during work, above what it held before.

    None on the CPU, which keeps no such count. The result of work is alive until the end.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak - before
