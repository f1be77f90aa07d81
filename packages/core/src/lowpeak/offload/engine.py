"""What moves bytes: the interface between the hooks and streams, events and host memory.

The hooks decide which bytes leave a device, when they come back, and what must wait for what. An
engine knows how: it owns the host memory, the copy streams and the events. Everything that passes
between the two is a device, a number of bytes, a one-dimensional uint8 tensor whose address and
length say all, and the opaque objects that the engine itself made.
"""

from typing import Literal, Protocol

import torch

Backend = Literal["auto", "torch", "native", "sim", "null"]


class HostRoom(Protocol):
    """Host memory for one copied range, in whatever pieces the engine likes."""

    @property
    def nbytes(self) -> int:
        """Bytes that fit."""


class Copy(Protocol):
    """One copy that was issued: what `done` and `wait` ask about."""

    @property
    def device(self) -> torch.device:
        """The device at one end of the copy."""


class CopyEngine(Protocol):
    """Host memory and asynchronous copies for the devices of one kind.

    Every method may be called from any thread, from a finaliser too, and none may block the host
    on the device except `synchronize`. "The current stream" is the calling thread's current stream
    of the device concerned, read at the call.
    """

    @property
    def name(self) -> str:
        """A short name for logs and reports."""

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the computation; without, they are part of its stream."""

    def begin_forward(self) -> None:
        """A forward under the hooks begins: a time to look after host memory."""

    def serves(self, device: torch.device) -> bool:
        """Whether tensors of this device can be moved."""

    def current_device(self) -> torch.device:
        """The device that the calling thread works on."""

    def capturing(self, device: torch.device) -> bool:
        """Whether the current stream is being captured into a graph."""

    def mark(self, device: torch.device) -> object:
        """Where the current stream is, or anything later in it: for `follow`."""

    def follow(self, mark: object) -> None:
        """Let the current stream of the mark's device go on after what was marked only."""

    def allocate(self, device: torch.device, nbytes: int) -> HostRoom:
        """Host memory that the device can copy to; OffloadHostMemoryError where there is none."""

    def release(self, room: HostRoom) -> None:
        """Give a room back; the engine reuses it only after the copies from and to it ended."""

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 [nbytes] on the device, allocated on the current stream."""

    def copy_out(self, source: torch.Tensor, room: HostRoom) -> Copy:
        """Copy uint8 [n] of a device into a room, after all that the current stream has queued.

        The caller keeps `source` alive until `done(copy)`, or until after `wait(copy, source)`.
        """

    def copy_in(self, room: HostRoom, target: torch.Tensor, after: Copy) -> Copy:
        """Copy a room into uint8 [n] of a device, after `after` and the current stream's work.

        The caller keeps `target` alive until `done(copy)`, or until after `wait(copy, target)`.
        """

    def done(self, copy: Copy) -> bool:
        """Whether a copy has ended, so that what is queued from now on comes after it."""

    def wait(self, copy: Copy, memory: torch.Tensor) -> None:
        """Let the current stream go on after the copy only, and count as a user of `memory`."""

    def synchronize(self) -> None:
        """Block the host until every copy has ended; raise what a copy met."""

    def peak_bytes(self, device: torch.device) -> int | None:
        """The most bytes that torch has had allocated on the device so far; None if unknown."""

    def allocated_bytes(self, device: torch.device) -> int:
        """Bytes that torch has allocated on the device now; 0 if unknown."""


class NullEngine:
    """Serves no device: the hooks are not installed, autograd runs as without them."""

    name = "null"
    overlaps = False

    def __init__(self, reason: str = "there is no device whose memory is not the host's") -> None:
        self.reason = reason

    def serves(self, device: torch.device) -> bool:
        """No device at all."""
        return False
