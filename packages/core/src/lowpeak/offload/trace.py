"""What was copied when, as a Chrome trace, and ranges for NVIDIA's profilers."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import torch

EVENTS_KEPT = 20_000
Track = Literal["out", "in"]
_TRACKS: dict[Track, int] = {"out": 1, "in": 2}
_TITLES = {"out": "copies to the host", "in": "copies back"}


class Trace:
    """The last 20000 events, by host time: when copies were issued and when they had ended.

    A copy's end is when the host saw it, at the next saved tensor or unpack, so spans are upper
    bounds. An event costs about half a microsecond.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[Track, int], tuple[int, int]] = {}
        self._events: deque[tuple[Track, int, int, int, int]] = deque(maxlen=EVENTS_KEPT)
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all events."""
        with self._lock:
            self._begun.clear()
            self._events.clear()

    def begin(self, track: Track, index: int, nbytes: int) -> None:
        """A copy of the unit `index` was issued."""
        with self._lock:
            self._begun[track, index] = (time.perf_counter_ns(), nbytes)
            if len(self._begun) > EVENTS_KEPT:  # ends are not seen where a graph is dropped
                del self._begun[next(iter(self._begun))]

    def end(self, track: Track, index: int) -> None:
        """It has ended, or its bytes are no longer wanted."""
        with self._lock:
            begun = self._begun.pop((track, index), None)
            if begun is not None:
                start, nbytes = begun
                self._events.append((track, index, start, time.perf_counter_ns(), nbytes))

    def chrome(self) -> dict[str, Any]:
        """The trace as chrome://tracing and Perfetto read it; times in microseconds."""
        with self._lock:
            events = list(self._events)
        process = os.getpid()
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": _TRACKS[track],
                "args": {"name": f"offload: {_TITLES[track]}"},
            }
            for track in _TRACKS
        ]
        spans = [
            {
                "name": f"{track} {index}",
                "cat": "offload",
                "ph": "X",
                "pid": process,
                "tid": _TRACKS[track],
                "ts": start / 1000,
                "dur": (stop - start) / 1000,
                "args": {"unit": index, "bytes": nbytes},
            }
            for track, index, start, stop, nbytes in events
        ]
        return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}


@contextlib.contextmanager
def nvtx_range(device: torch.device, name: str) -> Iterator[None]:
    """A range for Nsight Systems around what is issued for a CUDA device; elsewhere nothing."""
    if device.type != "cuda" or torch.version.cuda is None:
        yield
        return
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
