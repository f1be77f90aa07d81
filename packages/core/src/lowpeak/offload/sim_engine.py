"""A deterministic, adversarial engine over CPU tensors, for tests without a GPU.

CPU tensors play the device's. Copies wait in first-in-first-out queues, one a direction and
device, and run when the scheduler likes: never before something waits for them ("laziest"), at
once ("eager"), or at any call by a seeded throw ("random"). A copy whose source was freed too
early reads 0xCB, memory that was handed back is 0xCB at once, and every host room has canaries on
both sides, so a missing wait shows as wrong bytes and in `violations`, not as luck.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, Literal

import torch

from lowpeak.offload.engine import Copy, HostRoom
from lowpeak.offload.errors import OffloadError, OffloadHostMemoryError
from lowpeak.offload.storage import StorageReference, bytes_between

POISON = 0xCB
CANARY = 0x5A
CANARY_BYTES = 64

Mode = Literal["laziest", "eager", "random"]
Wait = Literal["compute", "copy_out"]


class SimRoom:
    """Host bytes between two canaries."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = torch.full((nbytes + 2 * CANARY_BYTES,), CANARY, dtype=torch.uint8)
        self.bytes.fill_(POISON)
        self.pending = 0
        self.released = False

    @property
    def bytes(self) -> torch.Tensor:
        """The room without its canaries."""
        return self.memory[CANARY_BYTES : CANARY_BYTES + self.nbytes]

    def intact(self) -> bool:
        """Whether nobody wrote over the edges."""
        edges = (self.memory[:CANARY_BYTES], self.memory[-CANARY_BYTES:])
        return all(bool((edge == CANARY).all()) for edge in edges)


class SimCopy:
    """One queued copy; it keeps no device memory alive, as no real copy does."""

    def __init__(
        self, tensor: torch.Tensor, room: SimRoom, *, outward: bool, after: "SimCopy | None"
    ) -> None:
        self.device = tensor.device
        self.outward = outward
        self.after = after
        self.room = room
        self.start = int(tensor.storage_offset())
        self.nbytes = tensor.numel()
        self.memory = StorageReference(tensor.untyped_storage())
        self.finished = False
        room.pending += 1


class CpuAsDevice:
    """What engines have in common to which CPU tensors are the device's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_capturing = False
        self.violations: list[str] = []

    def serves(self, device: torch.device) -> bool:
        """CPU tensors play the device's."""
        return device.type == "cpu"

    def current_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def capturing(self, device: torch.device) -> bool:
        """What `is_capturing` was set to."""
        return self.is_capturing

    def mark(self, device: torch.device) -> object:
        """Nothing: the CPU computes at once."""
        return None

    def follow(self, mark: object) -> None:
        """Nothing to wait for."""

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Bytes full of poison."""
        return torch.full((nbytes,), POISON, dtype=torch.uint8, device=device)

    def peak_bytes(self, device: torch.device) -> int | None:
        """Unknown."""
        return None

    def allocated_bytes(self, device: torch.device) -> int:
        """Unknown."""
        return 0

    def raise_violations(self) -> None:
        """Raise OffloadError for what was found wrong so far."""
        if self.violations:
            raise OffloadError(f"the simulated device was misused: {'; '.join(self.violations)}")


class SimEngine(CpuAsDevice):
    """See the module's text.

    `host_limit` is the number of host bytes after which `allocate` refuses. `ignored_waits` names
    the orderings to leave out ("compute": the current stream's wait for a copy; "copy_out": that
    of a copy back for its own copy out): with either, a test of the hooks must fail.
    """

    name = "sim"
    overlaps = True

    def __init__(
        self,
        *,
        seed: int = 0,
        mode: Mode = "random",
        host_limit: int | None = None,
        ignored_waits: Collection[Wait] = (),
    ) -> None:
        if mode not in ("laziest", "eager", "random"):
            raise ValueError(f"mode={mode!r} is not one of 'laziest', 'eager', 'random'")
        super().__init__()
        self.mode = mode
        self.host_limit = host_limit
        self.live_host_bytes = 0
        self.copies_out = 0
        self.copies_in = 0
        self._ignored_waits = frozenset(ignored_waits)
        self._random = random.Random(seed)
        self._queues: dict[tuple[torch.device, bool], deque[SimCopy]] = defaultdict(deque)
        self._lock = threading.RLock()

    def begin_forward(self) -> None:
        """Nothing: rooms have no pool."""

    def allocate(self, device: torch.device, nbytes: int) -> SimRoom:
        """A room full of poison."""
        with self._lock:
            self._tick()
            limit = self.host_limit
            if limit is not None and self.live_host_bytes + nbytes > limit:
                raise OffloadHostMemoryError(
                    f"{nbytes} bytes do not fit: {self.live_host_bytes} of {limit} are in use"
                )
            self.live_host_bytes += nbytes
            return SimRoom(nbytes)

    def release(self, room: HostRoom) -> None:
        """Poison the room once no copy is queued for it."""
        assert isinstance(room, SimRoom)
        with self._lock:
            self._tick()
            if room.released:
                self.violations.append("a room was released twice")
                return
            room.released = True
            self._reclaim(room)

    def copy_out(self, source: torch.Tensor, room: HostRoom) -> SimCopy:
        """Queue a copy from the device."""
        assert isinstance(room, SimRoom)
        self.copies_out += 1
        return self._queue(SimCopy(source, room, outward=True, after=None))

    def copy_in(self, room: HostRoom, target: torch.Tensor, after: Copy) -> SimCopy:
        """Queue a copy to the device."""
        assert isinstance(room, SimRoom)
        assert isinstance(after, SimCopy)
        if room.released:
            self.violations.append("a released room was read")
        self.copies_in += 1
        needed = None if "copy_out" in self._ignored_waits else after
        return self._queue(SimCopy(target, room, outward=False, after=needed))

    def done(self, copy: Copy) -> bool:
        """Whether the copy ran; in the laziest mode nothing runs for being asked."""
        assert isinstance(copy, SimCopy)
        with self._lock:
            self._tick()
            return copy.finished

    def wait(self, copy: Copy, memory: torch.Tensor) -> None:
        """Run the copy now: what the current stream computes next is computed at once."""
        assert isinstance(copy, SimCopy)
        if "compute" in self._ignored_waits:
            return
        with self._lock:
            self._run_through(copy)

    def synchronize(self) -> None:
        """Run all that is queued; raise for what was found wrong so far."""
        with self._lock:
            for queue in list(self._queues.values()):
                while queue:
                    self._run_through(queue[0])
        self.raise_violations()

    def _queue(self, copy: SimCopy) -> SimCopy:
        with self._lock:
            self._queues[copy.device, copy.outward].append(copy)
            if self.mode == "eager":
                self._run_through(copy)
            self._tick()
        return copy

    def _tick(self) -> None:
        """In the random mode, run some of the copies that a device could run now."""
        while self.mode == "random" and self._random.random() < 0.4:
            runnable = [
                queue[0]
                for queue in self._queues.values()
                if queue and (queue[0].after is None or queue[0].after.finished)
            ]
            if not runnable:
                return
            self._run_through(self._random.choice(runnable))

    def _run_through(self, copy: SimCopy) -> None:
        """Run a copy, after all that its queue and its dependencies put before it."""
        queue = self._queues[copy.device, copy.outward]
        while not copy.finished:
            head = queue[0]
            if head.after is not None and not head.after.finished:
                self._run_through(head.after)
            queue.popleft()
            self._run(head)

    def _run(self, copy: SimCopy) -> None:
        storage = copy.memory.get()
        if storage is None:
            kind = "source of a copy out" if copy.outward else "target of a copy in"
            self.violations.append(f"the {kind} was freed before the copy ran")
            if copy.outward:
                copy.room.bytes.fill_(POISON)
        else:
            tensor = bytes_between(storage, copy.start, copy.start + copy.nbytes)
            host = copy.room.bytes[: copy.nbytes]
            target, source = (host, tensor) if copy.outward else (tensor, host)
            target.copy_(source)
        copy.finished = True
        copy.room.pending -= 1
        self._reclaim(copy.room)

    def _reclaim(self, room: SimRoom) -> None:
        if not room.released or room.pending:
            return
        if not room.intact():
            self.violations.append("a copy wrote over the edge of its room")
        room.bytes.fill_(POISON)
        self.live_host_bytes -= room.nbytes
