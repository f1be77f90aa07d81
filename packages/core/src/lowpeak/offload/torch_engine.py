"""The engine made of torch's own streams, events and pinned tensors: CUDA, ROCm and XPU.

Two streams a device, one a direction. What each call orders after what:
* follow: a copy is issued later than its tensor is saved, perhaps with another stream current; that
  stream first waits for the one that was current then.
* copy_out: its stream waits for an event recorded on the current stream, then copies. The source
  is kept by the caller until the copy ended or the current stream waits for it, never by
  `record_stream`, whose effect depends on how far the host runs ahead.
* copy_in: its stream waits for an event recorded on the current stream, because the target may be
  memory that earlier work of that stream still uses, and for the copy out of the same bytes.
* wait: the current stream waits for the copy's event. The memory is marked as used by the current
  stream, which is free where it was allocated on it and needed where it was not.
Pinned memory comes from torch's caching host allocator, which hands a block out again only when
the copies that used it have ended, and rounds up to powers of two.
"""

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lowpeak.offload.engine import Copy, HostRoom
from lowpeak.offload.errors import OffloadHostMemoryError

DEVICE_TYPES = ("cuda", "xpu")


@dataclass(slots=True)
class TorchRoom:
    """A pinned tensor of bytes."""

    memory: torch.Tensor | None
    nbytes: int


@dataclass(slots=True)
class TorchCopy:
    """The event behind a copy."""

    device: torch.device
    finished: Any


class TorchEngine:
    """Copies of one device type beside its computation, or with `use_streams=False` within it."""

    def __init__(self, device_type: str, *, use_streams: bool = True) -> None:
        if device_type not in DEVICE_TYPES:
            raise ValueError(f"device_type={device_type!r} is not one of {DEVICE_TYPES}")
        self.name = f"torch ({device_type})"
        self.overlaps = use_streams
        self._type = device_type
        self._module: ModuleType = torch.get_device_module(device_type)
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._lock = threading.Lock()

    def begin_forward(self) -> None:
        """Nothing: torch looks after its pinned memory itself."""

    def serves(self, device: torch.device) -> bool:
        """Tensors of the engine's device type, on any of its devices."""
        return device.type == self._type

    def current_device(self) -> torch.device:
        """The device type's current device."""
        return torch.device(self._type, self._module.current_device())

    def capturing(self, device: torch.device) -> bool:
        """Whether a CUDA graph is being captured; XPU graphs are not known to torch 2.11."""
        if self._type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def mark(self, device: torch.device) -> object:
        """The current stream itself."""
        return self._module.current_stream(device)

    def follow(self, mark: Any) -> None:
        """Wait for all that is in the marked stream by now, if it is another one."""
        current = self._module.current_stream(mark.device)
        if current != mark:
            current.wait_stream(mark)

    def allocate(self, device: torch.device, nbytes: int) -> TorchRoom:
        """A pinned tensor; once more after torch gave its cached pinned blocks back."""
        with self._module.device(device):
            try:
                return TorchRoom(_pinned(nbytes), nbytes)
            except RuntimeError:
                torch._C._host_emptyCache()
            try:
                return TorchRoom(_pinned(nbytes), nbytes)
            except RuntimeError as error:
                raise OffloadHostMemoryError(
                    f"{nbytes} bytes of pinned host memory cannot be had ({error}): raise the "
                    "limit of the container or of locked memory, offload fewer bytes (min_bytes, "
                    "policy), or shorten the sequence"
                ) from error

    def release(self, room: HostRoom) -> None:
        """Drop the tensor; torch's host allocator watches the events of the copies."""
        assert isinstance(room, TorchRoom)
        room.memory = None

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Memory of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy_out(self, source: torch.Tensor, room: HostRoom) -> TorchCopy:
        """Device to pinned memory on the outward stream."""
        assert isinstance(room, TorchRoom)
        assert room.memory is not None
        return self._copy(source.device, room.memory, source, outward=True, after=None)

    def copy_in(self, room: HostRoom, target: torch.Tensor, after: Copy) -> TorchCopy:
        """Pinned memory to device on the inward stream."""
        assert isinstance(room, TorchRoom)
        assert room.memory is not None
        assert isinstance(after, TorchCopy)
        return self._copy(target.device, target, room.memory, outward=False, after=after)

    def done(self, copy: Copy) -> bool:
        """Whether the copy's event has passed."""
        assert isinstance(copy, TorchCopy)
        return bool(copy.finished.query())

    def wait(self, copy: Copy, memory: torch.Tensor) -> None:
        """Order the current stream after the copy; no host synchronisation."""
        assert isinstance(copy, TorchCopy)
        current = self._module.current_stream(copy.device)
        current.wait_event(copy.finished)
        memory.record_stream(current)

    def synchronize(self) -> None:
        """Block until all copies have ended."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.synchronize()

    def peak_bytes(self, device: torch.device) -> int | None:
        """What the caching allocator's statistics say."""
        return int(self._module.max_memory_allocated(device))

    def allocated_bytes(self, device: torch.device) -> int:
        """What the caching allocator's statistics say."""
        return int(self._module.memory_allocated(device))

    def _copy(
        self,
        device: torch.device,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        outward: bool,
        after: TorchCopy | None,
    ) -> TorchCopy:
        # The current stream is read before the copy stream becomes the current one (torchtitan
        # 2581: read after the switch, the wait is one of a stream for itself).
        current = self._module.current_stream(device)
        stream = self._stream(device, outward) if self.overlaps else current
        if stream != current:
            ready = self._module.Event()
            ready.record(current)
            stream.wait_event(ready)
        if after is not None:
            stream.wait_event(after.finished)
        finished = self._module.Event()
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
            finished.record(stream)
        return TorchCopy(device, finished)

    def _stream(self, device: torch.device, outward: bool) -> Any:
        with self._lock:
            stream = self._streams.get((device, outward))
            if stream is None:
                stream = self._streams[device, outward] = self._module.Stream(device)
            return stream


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
