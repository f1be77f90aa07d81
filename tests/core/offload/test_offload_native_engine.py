"""The engine of the native extension, on its simulated device: the same programs, its own failures.

`LOWPEAK_SIM_ENGINE=native pytest tests/core/offload` runs all the others' tests on it as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from dataclasses import replace
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
    assert_exact,
    assert_nothing_left,
    gradients_under,
    simulated,
)
from test_offload_graphs import SETTINGS, Setting, check
from torch import Tensor

from lowpeak.offload import OffloadActivations, OffloadError, OffloadHostMemoryError
from lowpeak.offload.context import choose_engine
from lowpeak.offload.native_engine import NativeEngine, NativeSimEngine
from lowpeak.offload.pinned_pool import MIB

pytestmark = [
    pytest.mark.native,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
every_mode = pytest.mark.parametrize("mode", MODES)
CPU = torch.device("cpu")
SHAPE = (64, 64)
BYTES = 64 * 64 * 4
SITES = ("create_event", "record", "wait", "query", "copy_out", "copy_in")


def on_engine(engine: Any, **options: Any) -> OffloadActivations:
    """Everything that is saved goes through this engine."""
    defaults = {"policy": "all", "min_bytes": 1, "keep_last": 0, "window_bytes": 2 * BYTES}
    context = OffloadActivations(**{**defaults, **options}, device_backend=engine)
    ENGINES[context] = engine
    return context


def chain(leaves: list[Tensor]) -> Tensor:
    out = leaves[0]
    for _ in range(6):
        out = out.sin() * leaves[0]
    return out


@settings(FAST, max_examples=60)
@given(scenarios(forbidden=True), SETTINGS, SETTINGS)
def test_gradients_and_errors_are_those_of_plain_autograd(
    scenario: Scenario, first: Setting, second: Setting
) -> None:
    check(scenario, replace(first, native=True), replace(second, native=True))


@every_mode
@pytest.mark.parametrize("use_streams", [True, False])
def test_bytes_go_out_and_come_back(mode: str, use_streams: bool) -> None:
    def context() -> OffloadActivations:
        return on_engine(WatchedNativeEngine(mode=mode, use_streams=use_streams))

    assert_exact(chain, [SHAPE], context)


@settings(FAST, max_examples=60)
@given(
    scenarios(size=4), st.sampled_from(SITES), st.integers(0, 12), st.integers(1, 4), st.integers()
)
def test_a_failing_driver_gives_an_error_or_the_gradient(
    scenario: Scenario, site: str, skip: int, times: int, seed: int
) -> None:
    """Never another gradient; and when the driver works again the next step is as ever."""
    plain = play_plain(scenario)
    context = simulated(MODES[seed % 3], seed % 2**32, native=True, window_bytes=200)
    engine = ENGINES[context]._engine(CPU)
    engine.fail_next(site, skip, times)
    ours = play(scenario, (context, context), Ledger())
    failed = [isinstance(seen, str) and "injected" in seen for _, seen in ours]
    if not failed[0]:
        kept = [index for index, injected in enumerate(failed) if not injected]
        assert_same_events([ours[i] for i in kept], [plain[i] for i in kept])
    engine.fail_next(site, 0, 0)
    del ours
    assert_same_events(play(scenario, (context, context), Ledger()), plain)


@every_mode
def test_without_host_memory_tensors_stay(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit into the pool stays on its device; the amounts and remedies are told."""
    engine = WatchedNativeEngine(mode=mode, limit_bytes=2 * MIB)
    context = OffloadActivations("all", min_bytes=1, keep_last=0, device_backend=engine)
    plain = gradients_under(nullcontext(), chain, [(512, 1024)])
    ours = gradients_under(context, chain, [(512, 1024)])
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))  # type: ignore[arg-type]
    stats = context.stats()
    assert stats.copied_out.count >= 1
    assert stats.kept["host_memory"].count >= 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for part in ("2.00 MiB", "Remedies: raise limit_bytes", "LOCAL_WORLD_SIZE", "min_bytes"):
        assert part in caplog.text


def test_torch_gives_its_memory_back_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, until memory was to be had again; what that makes free is used."""
    engine = NativeSimEngine(limit_bytes=2 * MIB)
    room = engine.allocate(CPU, MIB)
    emptied: list[str] = []

    def give_back() -> None:
        emptied.append("once")
        if len(emptied) == 1:
            engine.release(room)

    monkeypatch.setattr(engine, "_empty_torch_cache", give_back)
    second = engine.allocate(CPU, 2 * MIB)
    assert emptied == ["once"]
    for _ in range(2):
        with pytest.raises(OffloadHostMemoryError):
            engine.allocate(CPU, MIB)
    assert len(emptied) == 1
    engine.release(second)
    engine.release(engine.allocate(CPU, MIB))
    engine.begin_forward()
    with pytest.raises(OffloadHostMemoryError):
        engine.allocate(CPU, 4 * MIB)
    assert len(emptied) == 2


def test_rooms_are_used_again_while_copies_still_use_them() -> None:
    """With the host far ahead of the device, host memory does not grow."""
    engine = NativeSimEngine(mode="laziest")
    sources = [torch.full((3 * MIB // 2,), value, dtype=torch.uint8) for value in range(6)]
    targets, ends = [], []
    for source in sources:
        room = engine.allocate(CPU, source.numel())
        target = engine.empty(CPU, source.numel())
        ends.append((engine.copy_out(source, room), source))
        targets.append(target)
        ends.append((engine.copy_in(room, target, ends[-1][0]), target))
        engine.release(room)
    stats = engine.copy_stats(CPU)
    assert stats["handovers"] == 5
    assert engine.pool(CPU).stats().reserved_bytes == 2 * MIB
    for end, memory in ends:
        engine.wait(end, memory)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    engine.synchronize()
    assert engine.live_host_bytes == 0
    assert engine.copy_stats(CPU)["bytes_in"] == 9 * MIB


def test_memory_that_was_let_go_too_early_is_noted() -> None:
    engine = NativeSimEngine(mode="laziest")
    room = engine.allocate(CPU, 100)
    engine.copy_out(torch.zeros(100, dtype=torch.uint8), room)
    with pytest.raises(OffloadError, match="let go before its copy ended"):
        engine.synchronize()


def test_a_lost_device_is_told_and_left_alone() -> None:
    """A fault that no later call survives: each later use raises, nothing hangs or is wrong."""
    context = simulated("laziest", native=True, window_bytes=0)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = x.sin().exp().sin()
    ENGINES[context]._engine(CPU).fail_next("copy_in", loses=True)
    with pytest.raises(OffloadError, match="injected"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="the device was lost before: copy_in failed: injected"):
        context.synchronize()


def test_threads_share_an_engine() -> None:
    context = simulated("random", native=True, window_bytes=2 * BYTES)
    plain = [gradients_under(nullcontext(), chain, [SHAPE], seed=seed) for seed in range(4)]
    ours: dict[int, list[Tensor | None]] = {}

    def train(seed: int) -> None:
        for _ in range(5):
            leaf = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
            leaf.requires_grad_()
            with context:
                out = chain([leaf])
                loss = (out * out).sum()
            loss.backward()
            ours[seed] = [leaf.grad]

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        (a,), (b,) = ours[seed], plain[seed]
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
    assert_nothing_left(context)


def test_a_forked_child_is_told() -> None:
    engine = NativeSimEngine()
    room = engine.allocate(CPU, 100)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.allocate(CPU, 100)
        except RuntimeError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            engine.release(room)
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_process_ends_with_copies_on_their_way() -> None:
    program = """
        import torch
        from lowpeak.offload import OffloadActivations
        from lowpeak.offload.native_engine import NativeSimEngine
        engine = NativeSimEngine(mode="laziest")
        context = OffloadActivations("all", min_bytes=1, keep_last=0, device_backend=engine)
        x = torch.randn(64, 64, requires_grad=True)
        with context:
            out = x.sin().exp().sin()
        assert context.stats().copied_out.count
        print("end")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def test_where_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(device: str | None) -> None:
        found = None if device is None else torch.device(device)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: found)

    for device in (None, "xpu"):
        on(device)
        with pytest.raises(ValueError, match=f"'cuda'.*torch has {device}"):
            choose_engine("native", use_streams=True)
    on("cuda")
    for use_streams in (True, False):
        engine: Any = choose_engine("native", use_streams=use_streams)
        assert engine.overlaps == use_streams
    assert engine.name == f"native ({'hip' if torch.version.hip else 'cuda'})"
    assert engine.serves(torch.device("cuda", 1))
    assert not engine.serves(CPU)
    with pytest.raises(ValueError, match="idle_forwards"):
        NativeEngine(idle_forwards=-1)
    monkeypatch.setattr("lowpeak.offload.native_engine.native_available", lambda: False)
    with pytest.raises(ImportError, match="device_backend='torch'"):
        NativeEngine()
