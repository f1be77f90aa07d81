from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class _BuildInfo(TypedDict):
    version: str
    compiler: str
    cxx_standard: int
    build_type: str
    sanitizers: str

def build_info() -> _BuildInfo: ...
def best_fit_decreasing(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

class HostMemoryError(RuntimeError): ...
class BackendError(RuntimeError): ...

class PinnedBlock:
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...

class _HostStatistics(TypedDict):
    backend: str
    pinned: bool
    integrated: bool
    numa_node: int
    budget_bytes: int
    reserved_bytes: int
    used_bytes: int
    live_bytes: int
    peak_reserved_bytes: int
    peak_live_bytes: int
    leaked_bytes: int
    segments: int
    blocks: int
    growths: int
    trimmed_segments: int
    idle_segments: int
    refusals: int
    pin_seconds: float
    driver_calls: int
    map_failures: int
    thread_failures: int
    register_failures: int
    driver_allocation_failures: int
    small_page_segments: int
    driver_segments: int
    unplaced_segments: int

class HostPool:
    def __init__(
        self,
        *,
        backend: str,
        device: int,
        segment_bytes: int,
        extent_bytes: int,
        low_water_bytes: int,
        limit_bytes: int | None,
        local_ranks: int,
        numa_node: int | None,
        threads: int,
    ) -> None: ...
    @property
    def why_null(self) -> str: ...
    def allocate_block(self, nbytes: int) -> PinnedBlock: ...
    def allocate_record(self, nbytes: int) -> int: ...
    def runs(self, record: int) -> list[tuple[int, int]]: ...
    def release(self, record: int) -> None: ...
    def trim(self, keep_bytes: int | None) -> int: ...
    def close(self) -> None: ...
    def statistics(self) -> _HostStatistics: ...
    def fail_next(self, site: str, skip: int = 0, times: int = 1) -> None: ...

class CopyError(RuntimeError): ...
class NativeCopy: ...

class _CopyStatistics(TypedDict):
    copies_out: int
    copies_in: int
    bytes_out: int
    bytes_in: int
    plain_bytes_out: int
    plain_bytes_in: int
    transfers: int
    handovers: int
    failures: int
    events: int
    leaving: int
    ring_bytes: int
    plain_reserved_bytes: int
    plain_live_bytes: int

class CopyEngine:
    def __init__(
        self, *, pool: HostPool, backend: str, device: int, mode: str, seed: int, beside: bool
    ) -> None: ...
    def allocate(self, nbytes: int, may_grow: bool = True) -> int: ...
    def allocate_plain(self, nbytes: int) -> int: ...
    def reserve_ring(self) -> bool: ...
    def begin_step(self, idle_steps: int) -> None: ...
    def release(self, room: int) -> None: ...
    def copy_out(self, room: int, source: int, nbytes: int, current: int) -> NativeCopy: ...
    def copy_in(
        self, room: int, target: int, nbytes: int, current: int, after: NativeCopy
    ) -> NativeCopy: ...
    def done(self, copy: NativeCopy) -> bool: ...
    def wait(self, copy: NativeCopy, current: int) -> None: ...
    def follow(self, current: int, marked: int) -> None: ...
    def synchronize(self) -> None: ...
    def statistics(self) -> _CopyStatistics: ...
    def fail_next(self, site: str, skip: int = 0, times: int = 1, loses: bool = False) -> None: ...
