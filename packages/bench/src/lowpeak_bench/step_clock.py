"""Times the steps of a trainer, counts their memory, and profiles one more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowpeak_bench.timing import synchronize

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass(frozen=True)
class Schedule:
    """Steps of a run: `warmup` that do not count, then up to `repeats` timed ones.

    Timing ends early once the timed steps have taken `enough_seconds`, so that a case of 38 s a
    step is timed once where one of 0.3 s is timed `repeats` times. `profiled` adds a last step.
    """

    warmup: int
    repeats: int
    enough_seconds: float
    profiled: bool = False

    @property
    def steps(self) -> int:
        """The most steps that the run takes."""
        return self.warmup + self.repeats + self.profiled


def allocated(device: torch.device) -> int | None:
    """Return the bytes the caching allocator holds, or None on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def step_clock(device: torch.device, schedule: Schedule) -> Any:
    """Return a trainer callback that measures every step and ends the run when it has enough.

    A step is forward, backward, clipping and optimizer; loading the batch is not in it. After the
    run it has, one entry a timed step: `seconds`; `peaks`, the most bytes allocated during the
    step; `activations`, the same above what was allocated when the step began (weights, optimizer
    states, the batch). On the CPU the last two are empty. A Trainer frees the gradients at the end
    of a step, so `activations` has those that are alive at the peak in it. `profile` is the
    profiler of the last step, where the schedule has one.
    """
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.peaks: list[int] = []
            self.activations: list[int] = []
            self.profile: profile | None = None
            self.begun = 0
            self.enough = False
            self.start = 0.0
            self.before: int | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.begun += 1
            synchronize(device)
            if self.enough:
                self.profile = _profiler(device)
                self.profile.start()
            self.before = allocated(device)
            if self.before is not None:
                torch.cuda.reset_peak_memory_stats(device)
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            synchronize(device)
            elapsed = time.perf_counter() - self.start
            if self.profile is not None:
                self.profile.stop()
                control.should_training_stop = True
            elif self.begun > schedule.warmup:
                self._count(elapsed)
                self.enough = (
                    len(self.seconds) == schedule.repeats
                    or sum(self.seconds) >= schedule.enough_seconds
                )
                control.should_training_stop = self.enough and not schedule.profiled

        def _count(self, elapsed: float) -> None:
            self.seconds.append(elapsed)
            if self.before is not None:
                peak = torch.cuda.max_memory_allocated(device)
                self.peaks.append(peak)
                self.activations.append(peak - self.before)

    return StepClock()


def _profiler(device: torch.device) -> profile:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # torch 2.11 keeps no events of a profiler without a schedule unless told to
    return profile(activities=activities, acc_events=True)
