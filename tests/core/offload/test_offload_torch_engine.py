"""The engine of torch streams: what it orders after what, on streams that only write a log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from lowpeak.offload import OffloadHostMemoryError, torch_engine
from lowpeak.offload.torch_engine import TorchEngine

CPU = torch.device("cpu")


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    device = CPU

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class Event:
    def __init__(self) -> None:
        self.name = "nothing"

    def record(self, stream: Stream) -> None:
        self.name = f"event {len(stream.log)} of {stream.name}"
        stream.log.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return self.name != "nothing"


class Device:
    """Looks like torch.cuda as far as the engine goes."""

    Event = Event

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream(self.log, "compute")
        self.made = 0

    def Stream(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream(self.log, f"side {self.made}")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append(f"copy on {stream.name}")
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    return make(monkeypatch, use_streams=True)


def make(monkeypatch: pytest.MonkeyPatch, *, use_streams: bool) -> TorchEngine:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    monkeypatch.setattr(
        torch_engine, "_pinned", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    )
    return TorchEngine("cuda", use_streams=use_streams)


def log_of(engine: TorchEngine) -> list[str]:
    device: object = engine._module
    assert isinstance(device, Device)
    return device.log


def test_copies_are_ordered_behind_what_they_need(engine: TorchEngine) -> None:
    source = torch.arange(8, dtype=torch.uint8)
    room = engine.allocate(CPU, 8)
    out = engine.copy_out(source, room)
    assert log_of(engine) == [
        "compute records event 0 of compute",
        "side 1 waits for event 0 of compute",
        "copy on side 1",
        "side 1 records event 3 of side 1",
    ]
    log_of(engine).clear()
    target = torch.zeros(8, dtype=torch.uint8)
    engine.copy_in(room, target, out)
    assert log_of(engine) == [
        "compute records event 0 of compute",
        "side 2 waits for event 0 of compute",
        "side 2 waits for event 3 of side 1",
        "copy on side 2",
        "side 2 records event 4 of side 2",
    ]
    assert torch.equal(target, source)
    engine.synchronize()
    assert log_of(engine)[-2:] == ["host waits for side 1", "host waits for side 2"]


def test_waiting_orders_the_current_stream_and_uses_the_memory(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    users: list[object] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: users.append(stream.name)
    )
    source = torch.arange(8, dtype=torch.uint8)
    copy = engine.copy_out(source, engine.allocate(CPU, 8))
    log_of(engine).clear()
    engine.wait(copy, source)
    assert log_of(engine) == ["compute waits for event 3 of side 1"]
    assert users == ["compute"]
    assert engine.done(copy)


def test_a_late_copy_follows_the_stream_that_saved(engine: TorchEngine) -> None:
    """Copies start when the next tensor is saved, and that may be on another stream."""
    device: object = engine._module
    assert isinstance(device, Device)
    mark = engine.mark(CPU)
    engine.follow(mark)
    assert log_of(engine) == []
    device.current = Stream(device.log, "other")
    engine.follow(mark)
    assert log_of(engine) == ["other waits for all of compute"]


def test_without_streams_copies_are_part_of_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(monkeypatch, use_streams=False)
    engine.copy_out(torch.arange(8, dtype=torch.uint8), engine.allocate(CPU, 8))
    assert log_of(engine) == ["copy on compute", "compute records event 1 of compute"]
    assert not engine.overlaps


def test_an_error_in_a_copy_leaves_the_current_stream(engine: TorchEngine) -> None:
    """functorch's offload did not restore it."""
    room = engine.allocate(CPU, 4)
    with pytest.raises(RuntimeError):
        engine.copy_out(torch.arange(8, dtype=torch.uint8), room)
    device: object = engine._module
    assert isinstance(device, Device)
    assert device.current.name == "compute"


def test_pinning_is_tried_again_and_then_told(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def refuse(nbytes: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch_engine, "_pinned", refuse)
    emptied: list[int] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(calls), raising=False)
    with pytest.raises(OffloadHostMemoryError, match="8 bytes of pinned host memory cannot be had"):
        engine.allocate(CPU, 8)
    assert (calls, emptied) == (2, [1])


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device_type='mps' is not one of"):
        TorchEngine("mps")
