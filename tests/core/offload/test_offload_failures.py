"""Whatever fails - memory, copies, the device, the user's code - no gradient is wrong for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_graphs import Ledger
from offload_oracle import (
    FAST,
    Scenario,
    assert_same_events,
    collect,
    play,
    play_plain,
    scenarios,
    torch_leaves_alive,
)
from offload_simulated import (
    ENGINES,
    MODES,
    WatchedEngine,
    assert_exact,
    assert_nothing_left,
    simulated,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowpeak.offload import OffloadActivations
from lowpeak.offload.engine import Copy, HostRoom
from lowpeak.offload.errors import OffloadError, OffloadHostMemoryError

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (16, 16)
BYTES = 16 * 16 * 4
CALLS = ("allocate", "copy_out", "copy_in", "empty", "done", "wait")


class FailingEngine(WatchedEngine):
    """Its `at`-th call of one method fails, and with `lasting` each one after it."""

    def __init__(self, call: str, at: int, *, lasting: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.call = call
        self.left = at
        self.lasting = lasting
        self.failures = 0

    def repair(self) -> None:
        self.call = "nothing"

    def allocate(self, device: torch.device, nbytes: int) -> Any:
        self._perhaps("allocate", OffloadHostMemoryError("injected: no host memory"))
        return super().allocate(device, nbytes)

    def empty(self, device: torch.device, nbytes: int) -> Tensor:
        self._perhaps("empty", torch.OutOfMemoryError("injected: no device memory"))
        return super().empty(device, nbytes)

    def copy_out(self, source: Tensor, room: HostRoom) -> Any:
        self._perhaps("copy_out", RuntimeError("injected: copy out"))
        return super().copy_out(source, room)

    def copy_in(self, room: HostRoom, target: Tensor, after: Copy) -> Any:
        self._perhaps("copy_in", RuntimeError("injected: copy in"))
        return super().copy_in(room, target, after)

    def done(self, copy: Copy) -> bool:
        self._perhaps("done", RuntimeError("injected: query of an event"))
        return super().done(copy)

    def wait(self, copy: Copy, memory: Tensor) -> None:
        self._perhaps("wait", RuntimeError("injected: wait for an event"))
        super().wait(copy, memory)

    def _perhaps(self, call: str, error: Exception) -> None:
        if call != self.call:
            return
        self.left -= 1
        if self.left == 0 or (self.left < 0 and self.lasting):
            self.failures += 1
            raise error


def failing(engine: FailingEngine, **options: Any) -> OffloadActivations:
    defaults = {"policy": "all", "min_bytes": 1, "keep_last": 0, "window_bytes": 200}
    context = OffloadActivations(**{**defaults, **options}, device_backend=engine)
    ENGINES[context] = engine
    return context


# An event that fails while a dropped graph is cleared away has nobody to tell.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(FAST, max_examples=80)
@given(
    scenarios(size=4),
    st.sampled_from(CALLS),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(MODES),
)
def test_a_failing_engine_gives_an_error_or_the_gradient(
    scenario: Scenario, call: str, at: int, lasting: bool, mode: str
) -> None:
    """Never another gradient; and with the engine repaired the next step is as ever."""
    plain = play_plain(scenario)
    engine = FailingEngine(call, at, lasting=lasting, mode=mode)
    context = failing(engine)
    ours = play(scenario, (context, context), Ledger())
    injected = [isinstance(seen, str) and "injected" in seen for _, seen in ours]
    if call == "allocate":
        # The tensor stays on its device: nobody notices.
        assert not any(injected)
    if injected[0]:
        assert len(ours) == 1
    else:
        kept = [index for index, failed in enumerate(injected) if not failed]
        assert_same_events([ours[i] for i in kept], [plain[i] for i in kept])
    del ours
    engine.repair()
    # With broken events nobody can tell when memory may go.
    if call not in ("done", "wait") and not torch_leaves_alive(scenario):
        assert_nothing_left(context)
    again = play(scenario, (context, context), Ledger())
    assert_same_events(again, plain)


@every_mode
def test_without_host_memory_tensors_stay(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """unslothai/unsloth#338 (row 25): a clear message, once, and the training goes on."""
    context = failing(FailingEngine("allocate", 3, lasting=True, mode=mode))

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for _ in range(6):
            out = out.sin()
        return out

    for step in range(3):
        assert_exact(forward, [SHAPE], lambda: context, seed=step)
    stats = context.stats()
    assert stats.copied_out.count == 2
    assert stats.kept["host_memory"].bytes >= 3 * 2 * 3 * BYTES
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "injected: no host memory" in caplog.text


def test_what_was_refused_is_tried_again() -> None:
    """Memory that comes back is used: what found none is no lesson on the end of a forward."""

    def copied(context: OffloadActivations) -> int:
        before = context.stats().copied_out.count
        x = torch.randn(SHAPE, requires_grad=True)
        with context:
            out = x
            for _ in range(6):
                out = out.sin().exp()
        out.sum().backward()
        return context.stats().copied_out.count - before

    engine = FailingEngine("allocate", 3, lasting=True, mode="laziest")
    context = failing(engine, window_bytes=16 * BYTES)
    assert copied(context) == 2
    engine.repair()
    healthy = failing(FailingEngine("nothing", 0, mode="laziest"), window_bytes=16 * BYTES)
    assert copied(context) == copied(healthy) > 2


def test_memory_of_a_dropped_graph_stays_where_no_wait_is_possible(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copy that is still to run must not write into what the allocator gave to somebody else."""
    engine = FailingEngine("nothing", 1, lasting=True, mode="laziest")
    context = failing(engine, window_bytes=2 * BYTES)
    with context:
        late = torch.randn(SHAPE, requires_grad=True).sin().exp().sin().exp()
        out = late.sin().exp()
    torch.autograd.grad(out.sum(), late)  # fetches ahead what is saved before `late`
    engine.call = "wait"
    del out, late
    kept = [record for record in caplog.records if "its memory is kept" in record.getMessage()]
    assert len(kept) == len(caplog.records) > 0
    collect()  # the error and the frame that raised it hold each other, and the memory
    assert engine.held() == len(kept)
    engine.repair()
    assert_nothing_left(context, kept=len(kept))


@every_mode
@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_a_failed_copy_names_the_tensor(mode: str, call: str) -> None:
    """R13: the error is raised where the value is asked for, with the tensor's number and bytes."""
    context = failing(FailingEngine(call, 1, mode=mode))
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = x.sin().exp().sin()
    with pytest.raises(OffloadError, match=rf"{BYTES} bytes.*injected"):
        out.sum().backward()
    assert x.grad is None


@every_mode
def test_prefetch_without_device_memory_waits_until_asked(mode: str) -> None:
    """Memory that is missing ahead of time may be there in time."""
    context = failing(FailingEngine("empty", 2, mode=mode), window_bytes=4 * BYTES)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for _ in range(6):
            out = out.sin()
        return out

    assert_exact(forward, [SHAPE], lambda: context)
    assert context.stats().prefetch_refused.count >= 1


class Stop(Exception):
    """Raised by the user's code."""


@every_mode
@pytest.mark.parametrize("where", ["forward", "hook", "function"])
def test_errors_of_the_users_code(mode: str, where: str) -> None:
    """Out of memory in a forward, or a hook that raises in backward: the step is lost, no more."""
    context = simulated(mode)

    def run(x: Tensor, stop: bool) -> Tensor:
        out = x.sin().exp()
        if stop and where == "forward":
            raise Stop
        out = out.tanh()
        if stop and where == "hook":
            out.register_hook(_raise)
        return Raises.apply(out.cos(), stop and where == "function").sin()

    def step(context: Any, stop: bool) -> Tensor | None:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with context:
            out = run(x, stop)
        out.sum().backward()
        return x.grad

    plain = step(nullcontext(), False)
    for _ in range(3):
        with pytest.raises(Stop):
            step(context, True)
        collect()
        assert_nothing_left(context)
        ours = step(context, False)
        assert ours is not None
        assert plain is not None
        assert torch.equal(ours, plain)
    # No hook is left behind by any of it.
    x = torch.randn(SHAPE, requires_grad=True)
    before = context.stats().saved
    x.sin().exp().sum().backward()
    assert context.stats().saved == before


def _raise(_gradient: Tensor) -> None:
    raise Stop


class Raises(torch.autograd.Function):
    """The identity; its backward may raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stop: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.stop = stop
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.stop:
            raise Stop
        return gradients[0] + 0 * ctx.saved_tensors[0], None


class Refusing(TorchDispatchMode):
    """As a selective checkpoint's, which knows its own operations only."""

    def __torch_dispatch__(self, *args: Any) -> object:
        raise AssertionError("an operation of somebody else")


@every_mode
def test_a_graph_is_collected_under_a_dispatch_mode(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector runs anywhere; what it ends with the graph is no operation of the mode's."""
    context = simulated(mode, window_bytes=1 << 20)
    cycle: list[object] = []
    with context:
        out = torch.randn(SHAPE, requires_grad=True)
        for _ in range(4):
            out = out.exp()
        cycle += [out, cycle]
    del out, cycle
    with Refusing():
        collect()
    assert caplog.records == []
    assert context.stats().copied_out.count == 4
    assert_nothing_left(context)
