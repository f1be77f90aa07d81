"""Live bytes over the time of a block of code, from the allocators' own events.

Both the CPU allocator and the caching allocators of CUDA and XPU report every allocation and
release to the torch profiler, also those made inside a torch.library op or the autograd engine.
One recording serves all open windows: a window that opens or closes ends the recording, hands
its events to the windows open so far, and starts the next, because a profiler cannot be nested.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

_ACCELERATORS = ("cuda", "xpu")


class MemoryPoint(NamedTuple):
    """Live bytes right after one allocation or release."""

    seconds: float
    """Host time since the window opened, in seconds."""
    bytes: int
    """Live bytes from this moment on."""


@dataclass(init=False)
class MemoryReport:
    """What one `track_memory` window saw; its fields exist once the window has closed.

    On CUDA and XPU bytes are those of the caching allocator for the device (`memory_allocated`,
    whole blocks, so rounded up to 512), everything that lived before the window included. The
    CPU allocator keeps no such total: there `start_bytes` is 0, bytes are exact, and only what
    was allocated inside the window counts, until it is released.
    """

    device: torch.device
    """The device whose allocator was watched."""
    start_bytes: int
    """Live bytes when the window opened (0 on CPU)."""
    peak_bytes: int
    """The most bytes alive at one moment, `start_bytes` included."""
    end_bytes: int
    """Live bytes when the window closed."""
    allocated_bytes: int
    """Sum of the sizes of all allocations made inside the window, in bytes."""
    allocation_count: int
    """Number of allocations made inside the window."""
    seconds: float
    """Length of the window in seconds of host time."""
    timeline: tuple[MemoryPoint, ...] = field(repr=False)
    """The start, one point for each allocation or release, and the end, in order of time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        if name in {entry.name for entry in fields(self)}:
            raise AttributeError(f"MemoryReport.{name} is known once the track_memory block ended")
        raise AttributeError(f"MemoryReport has no attribute {name!r}")

    @property
    def peak_above_start_bytes(self) -> int:
        """The most bytes that the window held on top of what it started with."""
        return self.peak_bytes - self.start_bytes


@contextlib.contextmanager
def track_memory(device: torch.device | str | None = None) -> Iterator[MemoryReport]:
    """Record the live bytes of one device while the block runs, and yield the report.

    `device` is a CPU, CUDA or XPU device; None takes the current CUDA or XPU device, and the CPU
    where there is none. The report is filled when the block ends, by an exception too. Windows
    may be nested, each for its own device; all of one process belong to one thread. Work of the
    autograd engine is seen; that of other threads is not on CPU, and on an accelerator only in
    the totals.

    The torch profiler records every operator meanwhile, for about 1 microsecond each; closing the
    window then takes about 10 microseconds and 2 KB of host memory for each operator, allocation
    and release (30000 in a forward and backward of a model of 30 layers: 0.3 s, 60 MB). So open
    the window around steps, not around a whole training run. Torch 2.13 writes two lines that
    begin with "USDT" to stderr for each recording; KINETO_LOG_LEVEL=99 in the environment keeps
    them away.

    Raises ValueError for another kind of device, and RuntimeError where another thread has a
    window open, a torch profiler is already running, or one ran inside the block.
    """
    window = _Window(_resolve_device(device))
    _recorder.open(window)
    try:
        yield window.report
    finally:
        _recorder.close(window)


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        current = torch.accelerator.current_accelerator(check_available=True)
        device = current if current is not None and current.type in _ACCELERATORS else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type not in _ACCELERATORS:
        raise ValueError(
            f"device must be a cpu, cuda or xpu device, got {resolved}: its allocator does not "
            "report to the torch profiler"
        )
    return torch.empty(0, device=resolved).device  # carries the index of the current device


class _Window:
    """Turns the allocator events of one device into a report."""

    def __init__(self, device: torch.device) -> None:
        self.report = MemoryReport(device)
        self._owned: dict[int, int] = {}  # CPU: address -> bytes of blocks made in this window
        self._live = 0
        self._allocated_bytes = 0
        self._allocation_count = 0
        self._points: list[MemoryPoint] = []
        self._start_ns = 0
        self._allocator_peak = 0

    def begin(self) -> None:
        device = self.report.device
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._live = module.memory_allocated(device)
            self._allocator_peak = module.max_memory_allocated(device)
        self.report.start_bytes = self._live
        self._points.append(MemoryPoint(0.0, self._live))
        self._start_ns = time.time_ns()

    def take(self, events: Iterable[Any]) -> None:
        """Account for allocation events, which come in order of time."""
        device = self.report.device
        for event in events:
            block = event.extra_fields
            if block.device.type != device.type:
                continue
            if device.type == "cpu":
                if not self._take_cpu_block(block.ptr, block.alloc_size):
                    continue
            elif block.device.index != device.index:
                continue
            else:
                self._live = block.total_allocated
            if block.alloc_size > 0:
                self._allocated_bytes += block.alloc_size
                self._allocation_count += 1
            seconds = max(0.0, (event.start_time_ns - self._start_ns) * 1e-9)
            self._points.append(MemoryPoint(seconds, self._live))

    def finish(self, end_ns: int) -> None:
        report, device = self.report, self.report.device
        report.seconds = (end_ns - self._start_ns) * 1e-9
        peak = max(point.bytes for point in self._points)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._live = module.memory_allocated(device)
            # The allocator's own peak counts all threads; resetting it would spoil it for the
            # caller, so it is used where it grew.
            if module.max_memory_allocated(device) > self._allocator_peak:
                peak = max(peak, module.max_memory_allocated(device))
        self._points.append(MemoryPoint(report.seconds, self._live))
        report.peak_bytes = peak
        report.end_bytes = self._live
        report.allocated_bytes = self._allocated_bytes
        report.allocation_count = self._allocation_count
        report.timeline = tuple(self._points)

    def _take_cpu_block(self, address: int, size: int) -> bool:
        """Whether the block, allocated (size > 0) or released, is one of this window."""
        # Torch's size table outlives a recording, so it can report the release of a block of an
        # earlier one, with a stale size: only blocks of this window are released.
        if size > 0:
            self._owned[address] = size
            self._live += size
            return True
        released = self._owned.pop(address, None)
        self._live -= released or 0
        return released is not None


class _Recorder:
    """The one profiler of the process and the windows it serves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: list[_Window] = []
        self._thread: int | None = None
        self._profile: profile | None = None

    def open(self, window: _Window) -> None:
        with self._lock:
            if self._windows and self._thread != threading.get_ident():
                raise RuntimeError(
                    "track_memory is already open in another thread: the torch profiler serves "
                    "one thread, so open all windows there"
                )
            if not self._windows and _profiler_enabled():
                raise RuntimeError(
                    "track_memory needs the torch profiler, which is already running: close it "
                    "first, or read the memory events of that profiler (profile_memory=True)"
                )
            self._thread = threading.get_ident()
            self._stop()
            window.begin()
            self._start()
            self._windows.append(window)

    def close(self, window: _Window) -> None:
        with self._lock:
            end_ns = time.time_ns()  # reading the recording takes its time, not the block's
            try:
                self._stop()
            finally:
                self._windows.remove(window)
            window.finish(end_ns)
            if self._windows:
                self._start()

    def _start(self) -> None:
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self) -> None:
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        if not _profiler_enabled():
            raise RuntimeError(
                "another torch profiler ran inside a track_memory block and ended its recording: "
                "profile and track in separate runs"
            )
        running.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        assert running.kineto_results is not None
        events = _allocation_events(running.kineto_results.experimental_event_tree())
        for window in self._windows:
            window.take(events)


def _allocation_events(roots: list[Any]) -> list[Any]:
    """All allocation events below `roots`, by time; events of the same moment keep their order."""
    found = []
    stack = list(reversed(roots))
    while stack:
        event = stack.pop()
        if event.name == "[memory]":
            found.append(event)
        stack.extend(reversed(event.children))
    found.sort(key=lambda event: event.start_time_ns)
    return found


_recorder = _Recorder()
