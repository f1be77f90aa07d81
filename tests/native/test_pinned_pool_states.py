"""The pool as a state machine: whatever the order of calls, no overlap, no loss, no excess."""

import os
import sys
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lowpeak import native
from lowpeak.offload import OffloadHostMemoryError, PinnedPool
from lowpeak.offload.pinned_pool import MIB

pytestmark = pytest.mark.skipif(
    not native.native_available() or sys.platform != "linux",
    reason="lowpeak._native was not built here",
)
LIMIT = 24 * MIB
GRANULE = 65536
SIZES = st.one_of(st.integers(1, 200_000), st.integers(1, 12 * MIB))
SITES = st.sampled_from(["map", "thread", "register_host", "allocate_host", "unregister_host"])


class PoolMachine(RuleBasedStateMachine):
    """A pool of at most 24 MiB beside a model that knows sizes and addresses only."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PinnedPool(
            backend="sim",
            limit_bytes=LIMIT,
            segment_bytes=8 * MIB,
            extent_bytes=2 * MIB,
            low_water_bytes=8 * MIB,
            pin_threads=2,
        )
        self.blocks: dict[int, object] = {}  # by owner, whose number is at both ends of the block
        self.records: dict[int, int] = {}  # sizes by id
        self.refusals = 0
        self.owner = 0

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        try:
            block = self.pool.allocate(nbytes)
        except OffloadHostMemoryError:
            self.refusals += 1
            return
        self.owner += 1
        view = np.frombuffer(block, np.uint8)
        view[0] = view[-1] = self.owner % 256
        self.blocks[self.owner] = view

    @rule(nbytes=SIZES)
    def record(self, nbytes: int) -> None:
        try:
            record = self.pool._native.allocate_record(nbytes)
        except RuntimeError:
            self.refusals += 1
            return
        self.records[record] = nbytes

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.blocks:
            del self.blocks[data.draw(st.sampled_from(sorted(self.blocks)))]
        if self.records:
            record = data.draw(st.sampled_from(sorted(self.records)))
            self.pool._native.release(record)
            del self.records[record]

    @rule(keep=st.one_of(st.none(), st.integers(0, LIMIT)))
    def trim(self, keep: int | None) -> None:
        before = self.pool.stats()
        gone = self.pool.trim(keep)
        after = self.pool.stats()
        leaked = after.leaked_bytes - before.leaked_bytes
        assert before.reserved_bytes - after.reserved_bytes == gone + leaked
        mark = 8 * MIB if keep is None else keep
        assert after.reserved_bytes >= min(before.reserved_bytes, mark)

    @rule(site=SITES, skip=st.integers(0, 2), times=st.integers(1, 4))
    def fail_next(self, site: str, skip: int, times: int) -> None:
        self.pool._native.fail_next(site, skip, times)

    @rule()
    def fork(self) -> None:
        """The child is refused; it touches no lock and no memory of its parent."""
        with warnings.catch_warnings():
            # Python warns of forks beside threads; this child makes one call and ends.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                self.pool.stats()
            except RuntimeError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    @invariant()
    def ranges_do_not_overlap(self) -> None:
        ranges = [(view.ctypes.data, view.nbytes) for view in self.blocks.values()]  # type: ignore[attr-defined]
        for record, nbytes in self.records.items():
            runs = self.pool._native.runs(record)
            assert sum(size for _, size in runs) == nbytes
            ranges += runs
        end = 0
        for address, size in sorted(ranges):
            assert address % GRANULE == 0
            assert address >= end
            end = address + size

    @invariant()
    def owners_find_their_marks(self) -> None:
        for owner, view in self.blocks.items():
            assert view[0] == view[-1] == owner % 256  # type: ignore[index]

    @invariant()
    def numbers_add_up(self) -> None:
        stats = self.pool.stats()
        sizes = [view.nbytes for view in self.blocks.values()]  # type: ignore[attr-defined]
        sizes += self.records.values()
        assert stats.blocks == len(sizes)
        assert stats.live_bytes == sum(sizes)
        assert stats.used_bytes == sum(-(-size // GRANULE) * GRANULE for size in sizes)
        assert stats.used_bytes <= stats.reserved_bytes
        assert stats.reserved_bytes + stats.leaked_bytes <= stats.budget_bytes == LIMIT
        assert stats.growths - stats.trimmed_segments == stats.segments
        assert stats.refusals == self.refusals

    def teardown(self) -> None:
        """What is left goes in one go; nothing is reserved then."""
        for record in self.records:
            self.pool._native.release(record)
        self.records.clear()
        self.blocks.clear()
        for site in ("register_host", "unregister_host", "map", "allocate_host"):
            self.pool._native.fail_next(site, 0, 0)
        self.pool.trim(0)
        assert self.pool.stats().reserved_bytes == 0
        self.pool.close()


TestPoolStates = PoolMachine.TestCase
TestPoolStates.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
