"""PinnedPool: blocks in torch and numpy, lifetimes, limits, errors, forks, the end of a process."""

import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from lowpeak import native
from lowpeak.offload import OffloadHostMemoryError, PinnedPool
from lowpeak.offload import pinned_pool as module
from lowpeak.offload.pinned_pool import MIB

pytestmark = pytest.mark.skipif(
    not native.native_available() or sys.platform != "linux",
    reason="lowpeak._native was not built here",
)
SMALL = {"segment_bytes": 8 * MIB, "extent_bytes": 2 * MIB}


@pytest.fixture
def pool() -> PinnedPool:
    return PinnedPool(backend="sim", limit_bytes=32 * MIB, pin_threads=2, **SMALL)


def test_torch_and_numpy_share_a_block(pool: PinnedPool) -> None:
    block = pool.allocate(64)
    views = [
        torch.frombuffer(block, dtype=torch.float32),
        torch.from_dlpack(block).view(torch.float32),
        torch.from_numpy(np.frombuffer(block, np.float32)),
        torch.from_numpy(np.from_dlpack(block)).view(torch.float32),
    ]
    for value, view in enumerate(views):
        view.fill_(value)
        for other in views:
            assert other.tolist() == [value] * 16
            assert other.data_ptr() == block.address
    assert len(block) == block.nbytes == 64
    assert block.address % 65536 == 0
    assert memoryview(block).nbytes == 64
    assert block.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1)])
def test_an_export_nobody_took_lets_go(pool: PinnedPool, version: tuple[int, int] | None) -> None:
    capsule = pool.allocate(64).__dlpack__(max_version=version)
    assert ("dltensor_versioned" in repr(capsule)) == (version is not None and version >= (1, 0))
    assert pool.stats().blocks == 1
    del capsule
    assert pool.stats().blocks == 0


def test_an_export_refuses_what_it_cannot_do(pool: PinnedPool) -> None:
    block = pool.allocate(64)
    with pytest.raises(BufferError, match="dl_device"):
        block.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="copy"):
        block.__dlpack__(copy=True)
    with pytest.raises(ValueError, match="stream"):
        block.__dlpack__(stream=1)


@pytest.mark.parametrize(
    "view",
    [
        lambda block: torch.frombuffer(block, dtype=torch.uint8)[3:],
        lambda block: torch.from_dlpack(block)[3:],
        lambda block: np.frombuffer(block, np.uint8)[3:],
        lambda block: np.from_dlpack(block)[3:],
        memoryview,
    ],
)
def test_a_block_lives_as_long_as_its_views(pool: PinnedPool, view: object) -> None:
    seen = view(pool.allocate(1000))  # type: ignore[operator]
    gc.collect()
    assert pool.stats().live_bytes == 1000
    other = pool.allocate(1000)
    torch.frombuffer(other, dtype=torch.uint8).fill_(9)
    assert int(seen[0]) == 0  # fresh pages: the other block did not write here
    del seen
    gc.collect()
    assert pool.stats().live_bytes == 1000
    del other
    assert pool.stats().live_bytes == 0


def test_memory_given_back_is_poisoned_by_the_simulator(pool: PinnedPool) -> None:
    block = pool.allocate(100)
    address = block.address
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    del block
    again = pool.allocate(100)
    assert again.address == address
    assert set(memoryview(again)) == {0xCB}


def test_stats_add_up(pool: PinnedPool) -> None:
    blocks = [pool.allocate(n) for n in (1, 65536, 65537, 3 * MIB)]
    stats = pool.stats()
    assert (stats.backend, stats.pinned) == ("sim", True)
    assert stats.budget_bytes == 32 * MIB
    assert stats.live_bytes == 1 + 65536 + 65537 + 3 * MIB
    assert stats.used_bytes == 4 * 65536 + 3 * MIB
    assert stats.waste_bytes == stats.used_bytes - stats.live_bytes
    assert (stats.blocks, stats.segments, stats.growths) == (4, 1, 1)
    assert stats.reserved_bytes == stats.peak_reserved_bytes == 8 * MIB
    assert stats.pin_seconds > 0
    peak = stats.live_bytes
    blocks.clear()
    stats = pool.stats()
    assert (stats.live_bytes, stats.used_bytes, stats.peak_live_bytes) == (0, 0, peak)


def test_trim_keeps_the_low_water_mark() -> None:
    pool = PinnedPool(backend="null", low_water_bytes=8 * MIB, **SMALL)
    blocks = [pool.allocate(8 * MIB) for _ in range(3)]
    assert pool.trim() == 0
    blocks.clear()
    assert pool.trim() == 16 * MIB
    assert pool.stats().reserved_bytes == 8 * MIB
    assert pool.trim(0) == 8 * MIB
    with pytest.raises(ValueError, match="keep_bytes"):
        pool.trim(-1)


def test_null_says_that_it_does_not_pin() -> None:
    with PinnedPool(backend="null", **SMALL) as pool:
        assert not pool.stats().pinned
        assert not pool.allocate(1).pinned


def test_auto_takes_what_the_machine_has() -> None:
    stats = PinnedPool(**SMALL).stats()
    if not torch.cuda.is_available():
        assert stats.backend in ("null", "cuda", "hip")  # torch may be a build without a GPU
    else:
        assert stats.backend == ("cuda" if torch.version.hip is None else "hip")
    assert stats.pinned == (stats.backend != "null")


@pytest.mark.cuda
def test_a_gpu_copies_at_once_from_a_block() -> None:
    pool = PinnedPool(**SMALL)
    host = torch.frombuffer(pool.allocate(4 * MIB), dtype=torch.float32)
    host.copy_(torch.arange(MIB, dtype=torch.float32))
    there = host.to("cuda", non_blocking=True)
    assert host.is_pinned()  # torch says no before it has used CUDA
    host.copy_(there.mul(2), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(MIB, dtype=torch.float32) * 2)
    del host
    assert pool.trim() == pool.stats().peak_reserved_bytes
    assert pool.stats().leaked_bytes == 0


def test_a_refusal_names_amounts_and_remedies(pool: PinnedPool) -> None:
    kept = pool.allocate(20 * MIB)
    with pytest.raises(OffloadHostMemoryError) as caught:
        pool.allocate(16 * MIB)
    text = str(caught.value)
    for part in (
        "no host memory for 16.00 MiB (16777216 bytes)",
        "a segment of 16.00 MiB does not fit: the budget is 32.00 MiB (limit_bytes), ",
        "of which 20.00 MiB are reserved",
        "20.00 MiB of them in use",
        "drop blocks",
        "raise limit_bytes",
        "LOCAL_WORLD_SIZE",
    ):
        assert part in text
    assert pool.stats().refusals == 1
    del kept
    assert pool.allocate(16 * MIB).nbytes == 16 * MIB


def test_the_budget_is_shared_by_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = PinnedPool(backend="null", **SMALL).stats().budget_bytes
    four = PinnedPool(backend="null", local_ranks=4, **SMALL).stats().budget_bytes
    # Other processes take and give memory in between.
    assert four == pytest.approx(alone / 4, rel=0.3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert PinnedPool(backend="null", **SMALL).stats().budget_bytes < alone / 300


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limit_bytes": 0}, "limit_bytes"),
        ({"extent_bytes": MIB}, "extent_bytes"),
        ({"segment_bytes": 3 * MIB, "extent_bytes": 2 * MIB}, "segment_bytes"),
        ({"low_water_bytes": -1}, "low_water_bytes"),
        ({"local_ranks": 0}, "local_ranks"),
        ({"pin_threads": 0}, "pin_threads"),
        ({"backend": "metal"}, "metal"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PinnedPool(**{"backend": "null", **options})  # type: ignore[arg-type]


def test_wrong_sizes_are_named(pool: PinnedPool) -> None:
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1, not {nbytes}"):
            pool.allocate(nbytes)


@pytest.mark.skipif(torch.version.hip is not None, reason="has the driver")
def test_a_missing_driver_is_named_with_its_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"'hip' cannot be used here: libamdhip64.*'null'"):
        PinnedPool(backend="hip")


def test_a_missing_extension_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_available", lambda: False)
    with pytest.raises(ImportError, match="compiler"):
        PinnedPool()


def test_a_closed_pool_serves_its_blocks_to_the_end() -> None:
    with PinnedPool(backend="sim", **SMALL) as pool:
        tensor = torch.frombuffer(pool.allocate(100), dtype=torch.uint8)
        spare = pool.allocate(8 * MIB)
        del spare
    assert pool.stats().reserved_bytes == 8 * MIB
    with pytest.raises(RuntimeError, match="closed"):
        pool.allocate(1)
    tensor.fill_(7)
    assert int(tensor.sum()) == 700
    del tensor
    assert pool.stats().reserved_bytes == 0


def test_records_are_runs_of_extents(pool: PinnedPool) -> None:
    inner = pool._native
    blocks = [pool.allocate(2 * MIB) for _ in range(4)]
    base = blocks[0].address
    del blocks[2], blocks[0]  # the third and the first
    record = inner.allocate_record(3 * MIB)
    assert inner.runs(record) == [(base, 2 * MIB), (base + 4 * MIB, MIB)]
    inner.release(record)
    with pytest.raises(ValueError, match="not live"):
        inner.release(record)


def test_threads_share_a_pool(pool: PinnedPool) -> None:
    wrong = []

    def work(owner: int) -> None:
        for n in range(100):
            tensor = torch.frombuffer(pool.allocate(1 + n * 997), dtype=torch.uint8)
            tensor.fill_(owner)
            if tensor.unique().tolist() != [owner]:
                wrong.append(owner)

    workers = [threading.Thread(target=work, args=(owner,)) for owner in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert pool.stats().live_bytes == 0


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, for what a process can do only once."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_forked_child_is_told_and_leaves_its_parent_alone() -> None:
    """In a process of its own: torch's threads make forking this one unwise."""
    result = run_python(
        """
        import os
        from lowpeak.offload import PinnedPool
        pool = PinnedPool(backend="sim", segment_bytes=2**23, extent_bytes=2**21)
        block = pool.allocate(100)
        memoryview(block)[0] = 5
        child = os.fork()
        if child == 0:
            for use in (lambda: pool.allocate(1), pool.stats, pool.trim, lambda: block.address):
                try:
                    use()
                except RuntimeError as error:
                    assert "spawn" in str(error)
                else:
                    os._exit(1)
            try:
                memoryview(block)
            except BufferError as error:
                assert "spawn" in str(error.__cause__ or error)
            del block, pool
            own = PinnedPool(backend="sim", segment_bytes=2**23, extent_bytes=2**21)
            memoryview(own.allocate(3))[0] = 1
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert memoryview(block)[0] == 5
        print(pool.stats().live_bytes)
        """
    )
    assert (result.returncode, result.stdout) == (0, "100\n"), result.stderr


def test_an_interpreter_ends_with_pools_and_blocks_alive() -> None:
    result = run_python(
        """
        import sys, torch
        from lowpeak.offload import PinnedPool
        pool = PinnedPool(backend="sim", segment_bytes=2**23, extent_bytes=2**21)
        tensor = torch.frombuffer(pool.allocate(100), dtype=torch.uint8)
        sys.modules["kept"] = cycle = [pool, tensor]
        cycle.append(cycle)
        """
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
