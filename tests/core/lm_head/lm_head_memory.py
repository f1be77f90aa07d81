"""Bytes that a call allocates on the device, as its allocator reports them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocations:
    """Peak above the start, and the largest single allocation (CPU only, else the peak)."""

    peak: int
    largest: int


def measure(function: Callable[[], object], device: torch.device) -> Allocations:
    """Run function once unmeasured, then measured; results stay alive until the end.

    On CUDA, what was requested: the caching allocator counts blocks up to 1 MiB larger than that.
    """
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kept = function()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - start
        del kept
        return Allocations(peak, peak)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        kept = function()
    del kept
    # Each event of this name is one allocation (positive) or release (negative) of the allocator.
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler reported no allocation"
    live = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
        largest = max(largest, event.nbytes())
    return Allocations(peak, largest)
