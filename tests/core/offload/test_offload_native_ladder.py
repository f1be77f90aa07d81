"""Host memory that is refused: each way out in its turn, right gradients on each and after it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_graphs import Ledger
from offload_oracle import FAST, Scenario, assert_same_events, play, play_plain, scenarios
from offload_simulated import (
    ENGINES,
    MODES,
    WatchedNativeEngine,
    gradients_under,
)
from torch import Tensor

from lowpeak.offload import OffloadActivations, OffloadHostMemoryError, PinnedPool
from lowpeak.offload.native_engine import NativeSimEngine
from lowpeak.offload.pinned_pool import MIB

pytestmark = [
    pytest.mark.native,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
every_mode = pytest.mark.parametrize("mode", MODES)
CPU = torch.device("cpu")
FOREVER = 1 << 40
SHAPE = (512, 1024)
BYTES = 2 * MIB


def chain(leaves: list[Tensor]) -> Tensor:
    out = leaves[0]
    for _ in range(6):
        out = out.sin() * leaves[0]
    return out


def context_of(engine: Any) -> OffloadActivations:
    """Everything that is saved goes through this engine, and is waited for."""
    context = OffloadActivations(
        "all", min_bytes=1, keep_last=0, window_bytes=0, device_backend=engine
    )
    ENGINES[context] = engine
    return context


def let_driver_fail(engine: NativeSimEngine, times: int) -> None:
    """Pinned memory can neither be registered nor allocated, so many times."""
    for site in ("register_host", "allocate_host"):
        engine.pool(CPU)._native.fail_next(site, 0, times)


def fill(engine: NativeSimEngine, rooms: list[Any]) -> None:
    """Take rooms until there are no more."""
    while True:
        rooms.append(engine.allocate(CPU, 2 * MIB))


class Steps:
    """Steps of a context, each compared with plain autograd, and what each of them moved where."""

    def __init__(self, engine: NativeSimEngine) -> None:
        self.engine = engine
        self.context = context_of(engine)
        self._seed = 0

    def run(self, *, held: int = 0) -> dict[str, int]:
        """Bytes that went to pinned and to plain memory, and tensors that stayed for want of it.

        `held`: host bytes of rooms that the test has.
        """
        self._seed += 1
        self.context.reset_stats()
        before = self.engine.copy_stats(CPU)
        plain = gradients_under(nullcontext(), chain, [SHAPE], seed=self._seed)
        ours = gradients_under(self.context, chain, [SHAPE], seed=self._seed)
        for a, b in zip(ours, plain, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
        self.context.synchronize()
        assert self.engine.violations == []
        assert self.engine.live_host_bytes == held
        after = self.engine.copy_stats(CPU)
        went = {name: after[name] - before[name] for name in ("bytes_out", "plain_bytes_out")}
        stayed = self.context.stats().kept.get("host_memory")
        return {
            "pinned": went["bytes_out"] - went["plain_bytes_out"],
            "plain": went["plain_bytes_out"],
            "stayed": 0 if stayed is None else stayed.count,
        }


def test_each_way_out_in_its_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """offload.md 6.6: free memory, other pools, torch's cache, plain memory, the device, words."""
    engine = WatchedNativeEngine(mode="laziest", limit_bytes=64 * MIB, segment_bytes=8 * MIB)
    steps = Steps(engine)
    pool = engine.pool(CPU)
    ledger: list[str] = []

    # Pinned memory is there; a ring for later is kept beside it.
    usual = steps.run()
    whole = usual["pinned"]
    assert (whole >= 6 * BYTES, usual["plain"], usual["stayed"]) == (True, 0, 0)
    assert engine.copy_stats(CPU)["ring_bytes"] > 0

    # Refused once: another device's free segments go, then torch's cache, and it is asked again.
    other = PinnedPool(backend="sim", segment_bytes=2 * MIB, extent_bytes=2 * MIB)
    other.allocate(MIB)
    assert other.stats().reserved_bytes == 2 * MIB
    monkeypatch.setitem(engine._pools, torch.device("cuda", 7), other)

    def empty_cache() -> None:
        ledger.append(f"cache emptied, {other.stats().reserved_bytes} bytes in the other pool")
        let_driver_fail(engine, 0)

    monkeypatch.setattr(engine, "_empty_torch_cache", empty_cache)
    pool.trim(0)
    let_driver_fail(engine, FOREVER)
    assert steps.run() == usual
    assert ledger == ["cache emptied, 0 bytes in the other pool"]
    assert not caplog.records

    # Refused for good: what is pinned is used, the rest goes to plain memory, and this is told.
    monkeypatch.setattr(engine, "_empty_torch_cache", lambda: ledger.append("in vain"))
    pool.trim(0)
    let_driver_fail(engine, FOREVER)
    moved = steps.run()
    assert moved["plain"] >= 4 * BYTES
    assert (moved["pinned"] + moved["plain"], moved["stayed"]) == (whole, 0)
    assert ledger[1:] == ["in vain"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "plain memory, as fast as one thread" in caplog.text
    refusals = pool.stats().refusals
    for _ in range(8):
        assert steps.run() == moved
    # It is asked again after 1, 2 and 4 forwards, three times each; not for each of the tensors.
    assert 0 < pool.stats().refusals - refusals <= 9

    # Plain memory is refused as well: tensors stay on their device, and the amounts are told.
    rooms: list[Any] = []
    with pytest.raises(OffloadHostMemoryError, match=r"Pinned: .*Plain memory: .*Remedies"):
        fill(engine, rooms)
    moved = steps.run(held=len(rooms) * 2 * MIB)
    assert (moved["pinned"], moved["plain"]) == (0, 0)
    assert moved["stayed"] >= 6
    words = caplog.records[-1].getMessage()
    for part in (
        "no host memory for 2097152 bytes. Pinned: no host memory for 2.00 MiB",
        "registration failed: injected",
        "the budget is 64.00 MiB (limit_bytes), of which 64.00 MiB are reserved",
        "are available (",
        "Remedies: raise limit_bytes",
        "LOCAL_WORLD_SIZE",
        "offload fewer bytes",
    ):
        assert part in words

    # The driver works again: after some forwards it is asked, and plain memory makes room.
    for room in rooms:
        engine.release(room)
    let_driver_fail(engine, 0)
    found = [steps.run() for _ in range(16)]
    assert found[-1] == usual
    assert len(caplog.records) == 2


@every_mode
def test_tensors_stay_where_plain_memory_is_not_wanted(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = WatchedNativeEngine(mode=mode, pageable=False)
    steps = Steps(engine)
    let_driver_fail(engine, FOREVER)
    moved = steps.run()
    assert (moved["pinned"], moved["plain"]) == (0, 0)
    assert moved["stayed"] >= 6
    assert "saved tensors stay on their device: no host memory" in caplog.text
    let_driver_fail(engine, 0)
    steps.run()
    assert steps.run()["pinned"] >= 6 * BYTES
    assert engine.copy_stats(CPU)["ring_bytes"] == 0


@settings(FAST, max_examples=25)
@given(scenarios(size=4), st.sampled_from(MODES), st.booleans(), st.integers(0, 2**32 - 1))
def test_plain_memory_gives_the_gradients_of_plain_autograd(
    scenario: Scenario, mode: str, use_streams: bool, seed: int
) -> None:
    engine = WatchedNativeEngine(mode=mode, seed=seed, use_streams=use_streams)
    engine.release(engine.allocate(CPU, MIB))
    full = engine.allocate(CPU, engine.pool(CPU).stats().reserved_bytes - MIB)
    let_driver_fail(engine, FOREVER)
    context = context_of(engine)
    assert_same_events(play(scenario, (context, context), Ledger()), play_plain(scenario))
    engine.release(full)


@settings(FAST, max_examples=30)
@given(
    scenarios(size=4),
    st.sampled_from(("copy_out", "copy_in", "run_on_host", "wait", "record", "create_event")),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from(MODES),
)
def test_a_failing_driver_on_the_way_to_plain_memory(
    scenario: Scenario, site: str, skip: int, times: int, mode: str
) -> None:
    """An error or the gradient; and when the driver works again the next step is as ever."""
    plain = play_plain(scenario)
    engine = WatchedNativeEngine(mode=mode)
    engine.release(engine.allocate(CPU, 1))
    context = context_of(engine)
    inner = engine._engine(CPU)
    # Everything goes to plain memory, which has a ring already.
    ladder = engine._ladders[CPU]
    ladder._pinned = lambda nbytes: None  # type: ignore[method-assign]
    inner.fail_next(site, skip, times)
    ours = play(scenario, (context, context), Ledger())
    failed = [isinstance(seen, str) and "injected" in seen for _, seen in ours]
    if not failed[0]:
        kept = [index for index, injected in enumerate(failed) if not injected]
        assert_same_events([ours[i] for i in kept], [plain[i] for i in kept])
    inner.fail_next(site, 0, 0)
    del ours
    assert_same_events(play(scenario, (context, context), Ledger()), plain)


def test_idle_segments_go_back() -> None:
    """After `idle_forwards` forwards that did not use them, down to the low-water mark."""
    engine = WatchedNativeEngine(mode="laziest", idle_forwards=3, low_water_bytes=2 * MIB)
    steps = Steps(engine)
    steps.run()
    pool = engine.pool(CPU)
    reserved = pool.stats().reserved_bytes
    assert reserved >= 6 * BYTES
    small = torch.randn(64, 64, requires_grad=True)
    seen = []
    for _ in range(6):
        with steps.context:
            out = small.sin().exp()
        out.sum().backward()
        del out
        seen.append(pool.stats().reserved_bytes)
    assert seen[:3] == [reserved] * 3
    assert seen[-1] == 2 * MIB
    assert pool.stats().idle_segments == (reserved - 2 * MIB) // (2 * MIB)
    del small
    assert steps.run()["stayed"] == 0


def test_idle_segments_wait_for_pending_copies() -> None:
    engine = NativeSimEngine(mode="laziest", idle_forwards=0)
    source, target = torch.full((2, MIB), 7, dtype=torch.uint8)
    room = engine.allocate(CPU, MIB)
    out = engine.copy_out(source, room)
    back = engine.copy_in(room, target.zero_(), out)
    engine.release(room)
    for _ in range(5):
        engine.begin_forward()
    assert engine.pool(CPU).stats().reserved_bytes == 2 * MIB
    engine.wait(back, target)
    engine.wait(out, source)
    assert torch.equal(source, target)
