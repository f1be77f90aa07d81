"""Where the time of a profiled step goes, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lowpeak_bench import table

# Calls in which the host may wait for the device, or asks the driver for memory.
WAITING = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "aten::_local_scalar_dense")

# Kernels of torch's elementwise operators name what they compute behind 100 characters.
LONGEST_NAME = 160

Totals = dict[str, tuple[int, float]]


def kernel_table(profile: Any, title: str, *, rows: int = 40) -> str:
    """Render the work of a stopped torch.profiler run: kernels by total device time, with counts.

    Without a GPU the rows are operators by the time spent in themselves. A second table has the
    calls in which the host waited.
    """
    hosts, kernels = [], []
    for event in profile.events():
        if event.device_type.name == "CPU":
            hosts.append(event)
        elif not event.is_user_annotation:
            kernels.append(event)
    if kernels:
        totals = _totals(kernels, lambda event: event.time_range.elapsed_us())
    else:
        totals = _totals(hosts, lambda event: event.self_cpu_time_total)
    waits = [event for event in hosts if any(word in event.name for word in WAITING)]
    span = _span(kernels or hosts)
    busy = sum(microseconds for _, microseconds in totals.values())
    what = "kernel" if kernels else "operator"
    return (
        f"{title}\n\nfrom the first {what} to the last {span / 1e3:,.1f} ms, sum of all "
        f"{busy / 1e3:,.1f} ms\n\n"
        + _render(totals, what, busy, rows)
        + "\ncalls in which the host may wait, or asks for memory\n\n"
        + _render(_totals(waits, lambda event: event.cpu_time_total), "call", span, rows)
    )


def _totals(events: Iterable[Any], microseconds: Any) -> Totals:
    totals: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        count, total = totals[event.name]
        totals[event.name] = (count + 1, total + microseconds(event))
    return dict(totals)


def _span(events: Iterable[Any]) -> float:
    ranges = [event.time_range for event in events]
    return float(max(one.end for one in ranges) - min(one.start for one in ranges))


def _render(totals: Totals, what: str, whole: float, rows: int) -> str:
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    cells = [
        [
            name[:LONGEST_NAME].replace("|", "/"),
            f"{total / 1e3:.3f}",
            f"{100 * total / whole:.1f}",
            f"{count}",
            f"{total / count:.1f}",
        ]
        for name, (count, total) in ordered[:rows]
    ]
    return table.render([what, "ms", "%", "count", "us each"], cells)
