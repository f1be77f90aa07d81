"""Losses, times and live memory of the steps of one training run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from lowpeak.memory import MemoryPoint, MemoryReport, track_memory

Step = dict[str, Any]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, shared ones counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def state_bytes(models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state, in bytes."""
    tensors: list[torch.Tensor] = []
    for model in models:
        tensors.extend(model.buffers())
        for parameter in model.parameters():
            tensors.append(parameter)
            if parameter.grad is not None:
                tensors.append(parameter.grad)
    for state in optimizer.state.values():
        tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
    return storage_bytes(tensors)


def thin(points: Sequence[MemoryPoint], bins: int) -> list[MemoryPoint]:
    """Keep the lowest and the highest point of each of `bins` equal times, and both ends."""
    if len(points) <= 2 * bins:
        return list(points)
    width = points[-1].seconds / bins
    groups: dict[int, list[MemoryPoint]] = {}
    for point in points:
        groups.setdefault(int(point.seconds / width), []).append(point)
    kept = [points[0]]
    for group in groups.values():
        extremes = (
            min(group, key=lambda point: point.bytes),
            max(group, key=lambda point: point.bytes),
        )
        kept.extend(sorted(extremes, key=lambda point: point.seconds))
    kept.append(points[-1])
    return kept


class StepRecorder(TrainerCallback):
    """Watches each step of a transformers Trainer, from its batch to the freed gradients.

    Each of `steps` holds loss, gradient norm, seconds, and bytes: `state_bytes` (weights,
    optimizer state) before the step, `peak_bytes` in it, these included, `backward_peak_bytes`
    up to the end of the backward, `backward_seconds` when that was, and `timeline`, the live
    bytes over the step. On CPU the allocator has no total, so the state is counted and added.
    """

    def __init__(self, device: torch.device, announce: Callable[[int], None]) -> None:
        self.steps: list[Step] = []
        self._device = device
        self._announce = announce
        self._models: Sequence[torch.nn.Module] = ()
        self._state_bytes = 0
        self._opened = 0.0  # the window's own zero; the profiler then needs some milliseconds
        self._began = 0.0
        self._backward_seconds = 0.0
        self._window: contextlib.AbstractContextManager[MemoryReport] | None = None
        self._report: MemoryReport | None = None

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Name the models, trained and frozen, whose bytes belong to the state."""
        self._models = models

    def on_step_begin(self, *_: Any, **event: Any) -> None:
        """Open the window."""
        self._state_bytes = state_bytes(self._models, event["optimizer"])
        self._window = track_memory(self._device)
        self._opened = time.perf_counter()
        self._report = self._window.__enter__()
        self._synchronize()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the end of the backward."""
        self._synchronize()
        self._backward_seconds = time.perf_counter() - self._opened

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Close the window."""
        assert self._window is not None
        assert self._report is not None
        self._synchronize()
        seconds = time.perf_counter() - self._began
        self._window.__exit__(None, None, None)
        report, self._window, self._report = self._report, None, None
        base = self._state_bytes if self._device.type == "cpu" else 0
        end = self._backward_seconds
        backward_peak = max(live for second, live in report.timeline if second <= end)
        self.steps.append(
            {
                "seconds": seconds,
                "state_bytes": self._state_bytes,
                "peak_bytes": base + report.peak_bytes,
                "backward_peak_bytes": base + backward_peak,
                "backward_seconds": end,
                "allocation_count": report.allocation_count,
                "timeline": [(t, base + live) for t, live in thin(report.timeline, 1000)],
            }
        )
        self._announce(len(self.steps))

    def on_log(self, *_: Any, **event: Any) -> None:
        """Take loss and gradient norm of the step that has just ended."""
        logs = event["logs"]
        if "loss" in logs:
            self.steps[-1].update(loss=logs["loss"], grad_norm=logs["grad_norm"])

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
