"""Pinned host memory from Python: blocks that torch, numpy and devices can use."""

import logging
import os
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from lowpeak.native import native_available
from lowpeak.offload.errors import OffloadHostMemoryError

if TYPE_CHECKING:
    from lowpeak._native import CopyEngine, PinnedBlock

__all__ = ["PinnedPool", "PinnedPoolStats"]

PoolBackend = Literal["auto", "cuda", "hip", "sim", "null"]

MIB = 2**20
# Page faults of one segment stop scaling where memory bandwidth of a socket ends.
MOST_PIN_THREADS = 8

logger = logging.getLogger("lowpeak.offload")


@dataclass(frozen=True)
class PinnedPoolStats:
    """What a pool holds and what it cost; see `PinnedPool.stats`.

    ``used_bytes - live_bytes`` is lost to rounding, ``reserved_bytes - used_bytes`` is free.
    """

    backend: str
    """``"cuda"``, ``"hip"``, ``"sim"`` or ``"null"``."""
    pinned: bool
    """Whether devices can copy from and to the memory at full speed; False for ``"null"``."""
    integrated: bool
    """Whether the device's memory is the host's, so that pinned memory saves nothing."""
    numa_node: int
    """The node that the memory was asked from; -1 for any."""
    budget_bytes: int
    """What the pool may reserve at most."""
    reserved_bytes: int
    """In segments."""
    used_bytes: int
    """Taken from the segments, in granules of 64 KiB."""
    live_bytes: int
    """Asked for by the blocks that are alive."""
    peak_reserved_bytes: int
    peak_live_bytes: int
    leaked_bytes: int
    """Memory that the driver did not take back."""
    segments: int
    blocks: int
    """Allocations that are alive."""
    growths: int
    """Segments that were made so far."""
    trimmed_segments: int
    """Segments that were given back so far."""
    idle_segments: int
    """Those of them that a copy engine gave back because no forward used them any more."""
    refusals: int
    """Allocations that ended in `OffloadHostMemoryError`."""
    pin_seconds: float
    """Spent on making segments."""
    driver_calls: int
    map_failures: int
    thread_failures: int
    register_failures: int
    driver_allocation_failures: int
    small_page_segments: int
    """Segments for which the system refused huge pages."""
    driver_segments: int
    """Segments that the driver had to allocate because registering failed."""
    unplaced_segments: int
    """Segments for which the system refused the NUMA node."""

    @property
    def waste_bytes(self) -> int:
        """Lost to rounding."""
        return self.used_bytes - self.live_bytes


class PinnedPool:
    """Host memory that devices copy from and to at full speed, in blocks of any size.

    Memory is pinned a segment at a time and handed out from there: an allocation after the first
    costs microseconds, where pinning costs milliseconds, and sizes are rounded to 64 KiB, not to
    powers of two. A block goes back to the pool when it and everything made from it (tensors,
    arrays, memory views) are gone. Pools may be used from any thread, and only in the process that
    made them: see docs/pinned-pool.md.

    `limit_bytes`: the most to reserve. It is lowered to 0.8 of the memory that the machine and the
    cgroups of the process leave, divided by `local_ranks` (None: `LOCAL_WORLD_SIZE`, or 1).
    `backend`: ``"cuda"``, ``"hip"``, ``"sim"`` (a simulated driver, for tests), ``"null"`` (plain
    memory), or ``"auto"``: what the machine has, ``"null"`` where it has nothing; `stats` tells.
    `device`: the GPU whose NUMA node the memory comes from, unless `numa_node` names one (-1: any).
    `segment_bytes`: what the pool grows by, a multiple of `extent_bytes`, itself one of 2 MiB.
    `low_water_bytes`: what `trim` keeps. `pin_threads`: threads that fault pages in.

    Raises ImportError where the native extension is missing, RuntimeError where the machine lacks
    the backend, ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        backend: PoolBackend = "auto",
        device: int = 0,
        segment_bytes: int = 256 * MIB,
        extent_bytes: int = 8 * MIB,
        low_water_bytes: int = 0,
        numa_node: int | None = None,
        pin_threads: int | None = None,
        local_ranks: int | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ImportError("PinnedPool needs Linux; use torch's pin_memory() instead")
        if not native_available():
            raise ImportError(
                "PinnedPool needs lowpeak._native, which was not built into this install; install "
                "a C++17 compiler and reinstall lowpeak-core, or use torch's pin_memory() instead"
            )
        from lowpeak._native import BackendError, HostPool

        _check_sizes(limit_bytes, segment_bytes, extent_bytes, low_water_bytes)
        ranks = _local_ranks(local_ranks)
        try:
            self._native = HostPool(
                backend=backend,
                device=device,
                segment_bytes=segment_bytes,
                extent_bytes=extent_bytes,
                low_water_bytes=low_water_bytes,
                limit_bytes=limit_bytes,
                local_ranks=ranks,
                numa_node=numa_node,
                threads=_pin_threads(pin_threads, ranks),
            )
        except BackendError as error:
            raise RuntimeError(
                f"backend {backend!r} cannot be used here: {error}; use backend='null' for memory "
                "that is not pinned"
            ) from None
        if self._native.why_null:
            logger.info("PinnedPool has no GPU, its memory is plain: %s", self._native.why_null)

    def allocate(self, nbytes: int) -> "PinnedBlock":
        """A contiguous block of `nbytes` uninitialised bytes, its address a multiple of 64 KiB.

        The block has the buffer protocol and DLPack: ``torch.frombuffer(block, dtype=...)``,
        ``numpy.frombuffer(block, ...)``, ``torch.from_dlpack(block)``, ``memoryview(block)``.

        Raises `OffloadHostMemoryError` with the amounts and the remedies, ValueError for less than
        one byte, RuntimeError once the pool is closed or in a forked child.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, not {nbytes}")
        from lowpeak._native import HostMemoryError

        try:
            return self._native.allocate_block(nbytes)
        except HostMemoryError as error:
            raise OffloadHostMemoryError(
                f"{error}. Remedies: drop blocks that are not needed any more, and trim() other "
                "pools; raise limit_bytes, or leave it out; give the job more host memory or fewer "
                "local ranks (LOCAL_WORLD_SIZE)"
            ) from None

    def copy_engine(
        self,
        backend: str,
        device: int,
        *,
        mode: str = "random",
        seed: int = 0,
        beside: bool = True,
    ) -> "CopyEngine":
        """Streams and copies of a device over this memory, by addresses: see `native_engine`.

        `backend`: "cuda", "hip", "null" or "sim", which alone has a `mode` and a `seed`. Without
        `beside` copies are a part of the stream that is current.
        """
        from lowpeak._native import CopyEngine

        return CopyEngine(
            pool=self._native, backend=backend, device=device, mode=mode, seed=seed, beside=beside
        )

    def stats(self) -> PinnedPoolStats:
        """What the pool holds now, its peaks, and what it met so far."""
        return PinnedPoolStats(**self._native.statistics())

    def trim(self, keep_bytes: int | None = None) -> int:
        """Give segments without a live block back to the system; the bytes that went.

        At least `keep_bytes` stay reserved; None: the pool's `low_water_bytes`.
        """
        if keep_bytes is not None and keep_bytes < 0:
            raise ValueError(f"keep_bytes must not be negative: {keep_bytes}")
        return self._native.trim(keep_bytes)

    def close(self) -> None:
        """Allocate nothing any more; memory goes back to the system as its last block dies."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_sizes(limit: int | None, segment: int, extent: int, low_water: int) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit_bytes must be at least 1, not {limit}; None for no limit")
    if extent < 1 or extent % (2 * MIB):
        raise ValueError(f"extent_bytes must be a multiple of 2 MiB, not {extent}")
    if segment < 1 or segment % extent:
        raise ValueError(f"segment_bytes must be a multiple of extent_bytes, not {segment}")
    if low_water < 0:
        raise ValueError(f"low_water_bytes must not be negative: {low_water}")


def _local_ranks(given: int | None) -> int:
    """How many processes share the machine: as told, or as torchrun says."""
    ranks = given if given is not None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks < 1:
        raise ValueError(f"local_ranks must be at least 1, not {ranks}")
    return ranks


def _pin_threads(given: int | None, ranks: int) -> int:
    """Threads that fault pages in: as told, or this rank's share of the cores, 8 at most."""
    if given is None:
        return max(1, min(MOST_PIN_THREADS, len(os.sched_getaffinity(0)) // ranks))
    if given < 1:
        raise ValueError(f"pin_threads must be at least 1, not {given}")
    return given
