"""The engine of the native extension: raw copies between devices and a pool of pinned memory.

What waits for what is said in C++ (`cpp/include/lowpeak/copy`), in the terms of `torch_engine`.
Host memory comes from a `PinnedPool` for each device, in pieces that need not be adjacent, so that
reserved memory follows what is in use. A room that was given up while copies still use it goes on
to the next of its size, whose copy waits for them on the device. And where pinned memory is refused
there are further ways: see `host_ladder`.
"""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowpeak.native import native_available
from lowpeak.offload.engine import Copy, HostRoom
from lowpeak.offload.host_ladder import HostLadder
from lowpeak.offload.pinned_pool import MIB, PinnedPool, PoolBackend
from lowpeak.offload.sim_engine import CpuAsDevice, Mode
from lowpeak.offload.storage import StorageReference

if TYPE_CHECKING:
    from lowpeak import _native

IDLE_FORWARDS = 64
"""Forwards without use after which a free segment of host memory goes back to the system."""


@dataclass(slots=True, eq=False)
class NativeRoom:
    """A record of a device's pool, by its number."""

    engine: "_native.CopyEngine"
    number: int
    nbytes: int


@dataclass(slots=True, eq=False)
class NativeCopy:
    """The end of a copy."""

    device: torch.device
    engine: "_native.CopyEngine"
    end: "_native.NativeCopy"


class NativeEngine:
    """Copies of all CUDA or ROCm devices of this process, beside their computation.

    `limit_bytes` bounds the host memory of each device, `segment_bytes` is what it grows by; see
    `PinnedPool`. Free segments above `low_water_bytes` that `idle_forwards` forwards in a row did
    not use go back to the system. Where pinned memory is refused, saved tensors go to plain memory
    within the same bounds, or with `pageable=False` stay on their device. `use_streams=False`
    copies as a part of the computation.

    Raises ValueError for values below zero, ImportError where the native extension is missing, and
    RuntimeError in a forked child.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        segment_bytes: int = 256 * MIB,
        low_water_bytes: int = 0,
        idle_forwards: int = IDLE_FORWARDS,
        pageable: bool = True,
        use_streams: bool = True,
    ) -> None:
        if not native_available():
            raise ImportError(
                "the native copy engine needs lowpeak._native, which was not built into this "
                "install; install a C++17 compiler and reinstall lowpeak-core, or use "
                "device_backend='torch'"
            )
        self._backend: PoolBackend = "hip" if torch.version.hip is not None else "cuda"
        if idle_forwards < 0:
            raise ValueError(f"idle_forwards must not be negative: {idle_forwards}")
        self.overlaps = use_streams
        self._limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._low_water_bytes = low_water_bytes
        self._idle_forwards = idle_forwards
        self._pageable = pageable
        self._lock = threading.RLock()
        self._pools: dict[torch.device, PinnedPool] = {}
        self._engines: dict[torch.device, _native.CopyEngine] = {}
        self._ladders: dict[torch.device, HostLadder] = {}

    @property
    def name(self) -> str:
        """The backend too."""
        return f"native ({self._backend})"

    def pool(self, device: torch.device) -> PinnedPool:
        """The host memory of a device, for its `stats` and `trim`."""
        self._engine(device)
        return self._pools[device]

    def copy_stats(self, device: torch.device) -> dict[str, int]:
        """Copies, bytes, those of plain memory, events, `handovers`, `failures`; see C++."""
        return {name: int(str(n)) for name, n in self._engine(device).statistics().items()}

    def begin_forward(self) -> None:
        """Count it: idle segments go back, and what was refused may be asked for again."""
        with self._lock:
            ladders = list(self._ladders.items())
        for device, ladder in ladders:
            if not self.capturing(device):
                ladder.begin_forward(self._idle_forwards)

    def serves(self, device: torch.device) -> bool:
        """Tensors of any CUDA or ROCm device."""
        return device.type == "cuda"

    def current_device(self) -> torch.device:
        """CUDA's current device."""
        return torch.device("cuda", torch.cuda.current_device())

    def capturing(self, device: torch.device) -> bool:
        """Whether a CUDA graph is being captured."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def mark(self, device: torch.device) -> Any:
        """The current stream itself."""
        return torch.cuda.current_stream(device)

    def follow(self, mark: Any) -> None:
        """Wait for all that is in the marked stream by now, if it is another one."""
        current = torch.cuda.current_stream(mark.device)
        if current != mark:
            self._engine(mark.device).follow(current.cuda_stream, mark.cuda_stream)

    def allocate(self, device: torch.device, nbytes: int) -> NativeRoom:
        """Host memory, pinned if it can be had."""
        engine = self._engine(device)
        return NativeRoom(engine, self._ladders[device].allocate(nbytes), nbytes)

    def release(self, room: HostRoom) -> None:
        """Give a room up; its memory is used again behind the copies that use it."""
        assert isinstance(room, NativeRoom)
        room.engine.release(room.number)

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Memory of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy_out(self, source: torch.Tensor, room: HostRoom) -> NativeCopy:
        """Device to host, one transfer for each piece of the room."""
        assert isinstance(room, NativeRoom)
        current = self._stream(source.device)
        end = room.engine.copy_out(room.number, source.data_ptr(), source.numel(), current)
        return NativeCopy(source.device, room.engine, end)

    def copy_in(self, room: HostRoom, target: torch.Tensor, after: Copy) -> NativeCopy:
        """Host to device, one transfer for each piece of the room."""
        assert isinstance(room, NativeRoom)
        assert isinstance(after, NativeCopy)
        current = self._stream(target.device)
        address, nbytes = target.data_ptr(), target.numel()
        end = room.engine.copy_in(room.number, address, nbytes, current, after.end)
        return NativeCopy(target.device, room.engine, end)

    def done(self, copy: Copy) -> bool:
        """Whether the copy's event has passed."""
        assert isinstance(copy, NativeCopy)
        return copy.engine.done(copy.end)

    def wait(self, copy: Copy, memory: torch.Tensor) -> None:
        """Order the current stream after the copy; no host synchronisation."""
        assert isinstance(copy, NativeCopy)
        copy.engine.wait(copy.end, self._stream(copy.device))
        memory.record_stream(torch.cuda.current_stream(copy.device))

    def synchronize(self) -> None:
        """Block until all copies have ended."""
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.synchronize()

    def peak_bytes(self, device: torch.device) -> int | None:
        """What the caching allocator's statistics say."""
        return int(torch.cuda.max_memory_allocated(device))

    def allocated_bytes(self, device: torch.device) -> int:
        """What the caching allocator's statistics say."""
        return int(torch.cuda.memory_allocated(device))

    def _stream(self, device: torch.device) -> int:
        """The handle of the current stream."""
        return torch.cuda.current_stream(device).cuda_stream

    def _give_back(self, device: torch.device) -> None:
        """What else of this process holds pinned memory and does not use it."""
        with self._lock:
            others = [pool for other, pool in self._pools.items() if other != device]
        for pool in others:
            pool.trim(0)
        self._empty_torch_cache()

    def _empty_torch_cache(self) -> None:
        torch._C._host_emptyCache()

    def _engine(self, device: torch.device) -> "_native.CopyEngine":
        engine = self._engines.get(device)
        if engine is None:
            with self._lock:
                engine = self._engines.get(device)
                if engine is None:
                    pool = self._pools[device] = self._make_pool(device)
                    engine = self._make_engine(device, pool)
                    self._ladders[device] = HostLadder(
                        engine,
                        pageable=self._pageable,
                        give_back=lambda: self._give_back(device),
                    )
                    self._engines[device] = engine
        return engine

    def _make_pool(self, device: torch.device) -> PinnedPool:
        return PinnedPool(
            limit_bytes=self._limit_bytes,
            backend=self._backend,
            device=device.index,
            segment_bytes=self._segment_bytes,
            low_water_bytes=self._low_water_bytes,
        )

    def _make_engine(self, device: torch.device, pool: PinnedPool) -> "_native.CopyEngine":
        return pool.copy_engine(self._backend, device.index, beside=self.overlaps)


class NativeSimEngine(CpuAsDevice, NativeEngine):
    """The native engine over CPU tensors and the extension's simulated device, for tests.

    `seed` and `mode` are those of `SimEngine`: copies run at the latest, at once, or at random
    moments, and host memory that was given back is poisoned. Device memory that the caller let go
    too early is noted in `violations`; it is kept until the copy ended, so that a test that fails
    does not crash. `options` are those of `NativeEngine`.
    """

    def __init__(self, *, seed: int = 0, mode: Mode = "random", **options: Any) -> None:
        super().__init__(**{"segment_bytes": 2 * MIB, **options})
        self._backend = "sim"
        self._seed = seed
        self._mode = mode
        self._held: dict[NativeCopy, torch.UntypedStorage] = {}

    @property
    def copies_out(self) -> int:
        """Copies to the host that were issued."""
        return self.copy_stats(self.current_device())["copies_out"]

    @property
    def copies_in(self) -> int:
        """Copies from the host that were issued."""
        return self.copy_stats(self.current_device())["copies_in"]

    @property
    def live_host_bytes(self) -> int:
        """Bytes of rooms that are not given back, or that copies still use."""
        with self._lock:
            engines = dict(self._engines)
        live = 0
        for device, engine in engines.items():
            stats = engine.statistics()  # gives back what copies have left
            live += stats["plain_live_bytes"] - stats["ring_bytes"]
            live += self._pools[device].stats().live_bytes
        return live

    def copy_out(self, source: torch.Tensor, room: HostRoom) -> NativeCopy:
        """As on a device; the source is watched."""
        copy = super().copy_out(source, room)
        self._held[copy] = source.untyped_storage()
        return copy

    def copy_in(self, room: HostRoom, target: torch.Tensor, after: Copy) -> NativeCopy:
        """As on a device; the target is watched."""
        copy = super().copy_in(room, target, after)
        self._held[copy] = target.untyped_storage()
        return copy

    def done(self, copy: Copy) -> bool:
        """As on a device."""
        ended = super().done(copy)
        if ended:
            self._let_go(copy)
        return ended

    def wait(self, copy: Copy, memory: torch.Tensor) -> None:
        """Run the copy now: what the host computes next is computed at once."""
        assert isinstance(copy, NativeCopy)
        copy.engine.wait(copy.end, 0)
        self._let_go(copy)

    def synchronize(self) -> None:
        """Run all copies; raise for what was found wrong so far."""
        super().synchronize()
        for copy in list(self._held):
            self._let_go(copy)
        self.raise_violations()

    def _let_go(self, copy: Copy) -> None:
        assert isinstance(copy, NativeCopy)
        storage = self._held.pop(copy, None)
        if storage is None:
            return
        reference = StorageReference(storage)
        del storage
        if reference.get() is None:
            self.violations.append("device memory was let go before its copy ended")

    def _stream(self, device: torch.device) -> int:
        """The host itself."""
        return 0

    def _empty_torch_cache(self) -> None:
        """Torch has no pinned memory here."""

    def _make_pool(self, device: torch.device) -> PinnedPool:
        return PinnedPool(
            limit_bytes=self._limit_bytes,
            backend="sim",
            segment_bytes=self._segment_bytes,
            low_water_bytes=self._low_water_bytes,
            extent_bytes=2 * MIB,
            pin_threads=1,
        )

    def _make_engine(self, device: torch.device, pool: PinnedPool) -> "_native.CopyEngine":
        return pool.copy_engine("sim", 0, mode=self._mode, seed=self._seed, beside=self.overlaps)
