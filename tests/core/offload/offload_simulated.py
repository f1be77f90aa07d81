"""Offloading on the simulated device, and gradients beside those of plain autograd."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from offload_oracle import collect, same
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowpeak.offload import OffloadActivations
from lowpeak.offload.engine import HostRoom
from lowpeak.offload.native_engine import NativeSimEngine
from lowpeak.offload.sim_engine import SimEngine

MODES = ("laziest", "eager", "random")


# LOWPEAK_SIM_ENGINE=native: all tests with a simulated device run on the native extension's.
NATIVE = os.environ.get("LOWPEAK_SIM_ENGINE") == "native"


class Watching:
    """For a simulated device: weak references to all device memory that passes through it."""

    def __init__(self, *, seed: int = 0, mode: Any = "random", **options: Any) -> None:
        super().__init__(seed=seed, mode=mode, **options)  # type: ignore[call-arg]
        self.passed: dict[int, StorageWeakRef] = {}
        self.rooms = 0

    def empty(self, device: torch.device, nbytes: int) -> Tensor:
        memory: Tensor = super().empty(device, nbytes)  # type: ignore[misc]
        return self._watch(memory)

    def copy_out(self, source: Tensor, room: HostRoom) -> Any:
        return super().copy_out(self._watch(source), room)  # type: ignore[misc]

    def allocate(self, device: torch.device, nbytes: int) -> Any:
        self.rooms += 1
        return super().allocate(device, nbytes)  # type: ignore[misc]

    def held(self) -> int:
        """Storages of the device that are alive and were once copied from or to."""
        self.passed = {key: ref for key, ref in self.passed.items() if not ref.expired()}
        return len(self.passed)

    def _watch(self, memory: Tensor) -> Tensor:
        storage = memory.untyped_storage()
        self.passed[storage._cdata] = StorageWeakRef(storage)
        return memory


class WatchedEngine(Watching, NativeSimEngine if NATIVE else SimEngine):  # type: ignore[misc]
    """The simulated device of most tests."""


class WatchedNativeEngine(Watching, NativeSimEngine):
    """The native extension's, where a test asks for it."""


ENGINES: WeakKeyDictionary[OffloadActivations, Any] = WeakKeyDictionary()
Forward = Callable[[list[Tensor]], Tensor]


def simulated(
    mode: str = "laziest", seed: int = 0, *, native: bool = False, **options: Any
) -> OffloadActivations:
    """Everything is offloaded at once unless `options` say otherwise."""
    defaults = {"policy": "all", "min_bytes": 1, "keep_last": 0}
    engine = (WatchedNativeEngine if native else WatchedEngine)(seed=seed, mode=mode)
    context = OffloadActivations(**{**defaults, **options}, device_backend=engine)
    ENGINES[context] = engine
    return context


def gradients_under(
    context: AbstractContextManager[object],
    forward: Forward,
    shapes: Sequence[tuple[int, ...]],
    *,
    seed: int = 0,
    inside: bool = False,
) -> list[Tensor | None]:
    """Gradients of random leaves of these shapes, the same values for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    torch.manual_seed(seed)
    with context:
        out = forward(leaves)
        loss = (out * out).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [leaf.grad for leaf in leaves]


def assert_exact(
    forward: Forward,
    shapes: Sequence[tuple[int, ...]],
    context: Callable[[], OffloadActivations],
    *,
    seed: int = 0,
) -> None:
    """Bitwise plain autograd's gradients, backward inside and outside, and nothing left behind."""
    plain = gradients_under(nullcontext(), forward, shapes, seed=seed)
    assert any(gradient is not None for gradient in plain)
    for inside in (False, True):
        used = context()
        ours = gradients_under(used, forward, shapes, seed=seed, inside=inside)
        for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert same(a, b), f"gradient {index}:\n{a}\ninstead of\n{b}"
        assert_nothing_left(used)


def assert_nothing_left(context: OffloadActivations, *, kept: int = 0) -> None:
    """No host bytes, and of the device's storages only the `kept` ones that the test holds."""
    engine = ENGINES[context]
    context.synchronize()
    if context.stats().host_bytes or engine.held() > kept:
        collect()
        context.synchronize()
    assert engine.violations == []
    assert context.stats().host_bytes == 0
    assert engine.live_host_bytes == 0
    assert engine.held() <= kept
