"""`keep_bytes`: the newest bytes of a forward stay, all others move, and the peak is no higher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_oracle import FAST, collect, same
from offload_simulated import ENGINES, MODES, assert_nothing_left, simulated
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowpeak.offload import OffloadActivations
from lowpeak.offload.pending import Pending

every_mode = pytest.mark.parametrize("mode", MODES)
UNIT = 64


class Watch:
    """Device bytes that live at every save and use: of saved tensors, and of copies of them."""

    def __init__(self, context: OffloadActivations | None = None) -> None:
        self.context = context
        self.saved: list[StorageWeakRef] = []
        self.peak = 0
        self.uncopied: list[int] = []

    def look(self) -> None:
        passed = [] if self.context is None else list(ENGINES[self.context].passed.values())
        alive = {one.cdata: one for one in [*self.saved, *passed] if not one.expired()}
        self.peak = max(self.peak, sum(map(bytes_of, alive.values())))
        if self.context is not None:
            stats = self.context.stats()
            self.uncopied.append(stats.offloaded.bytes - stats.copied_out.bytes)


def bytes_of(reference: StorageWeakRef) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()


class Saves(torch.autograd.Function):
    """Saves one tensor of so many bytes, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nbytes: int, watch: Watch) -> Tensor:
        values = torch.arange(nbytes // 4, dtype=torch.float32) / nbytes + x.detach().sum()
        ctx.save_for_backward(values)
        watch.saved.append(StorageWeakRef(values.untyped_storage()))
        ctx.watch = watch
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        ctx.watch.look()
        return gradients[0] * (1 + values.sum() / values.numel()), None, None


def forward(sizes: list[int], watch: Watch) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 4).requires_grad_()
    out = x
    for nbytes in sizes:
        out = Saves.apply(out, nbytes, watch)
        watch.look()
    return x, out


def step(sizes: list[int], context: OffloadActivations) -> Watch:
    """Forward and backward, gradients compared with plain autograd's."""
    plain, out = forward(sizes, Watch())
    out.sum().backward()
    watch = Watch(context)
    with context:
        x, out = forward(sizes, watch)
    out.sum().backward()
    assert same(x.grad, plain.grad)
    return watch


def kept_of(sizes: list[int], keep_last: int, keep_bytes: int) -> int:
    """How many stay at the end of a forward: `keep_last`, and before them what fits."""
    kept = min(keep_last, len(sizes))
    left = keep_bytes
    for nbytes in reversed(sizes[: len(sizes) - kept]):
        left -= nbytes
        if left < 0:
            break
        kept += 1
    return kept


SIZES = st.lists(st.sampled_from([64, 64, 128, 192, 320]), min_size=1, max_size=14)


@settings(FAST, max_examples=80)
@given(SIZES, st.integers(0, 3), st.integers(0, 1500), st.sampled_from(MODES), st.booleans())
def test_all_but_the_newest_bytes_move(
    sizes: list[int], keep_last: int, keep_bytes: int, mode: str, use_streams: bool
) -> None:
    context = simulated(
        mode,
        keep_last=keep_last,
        keep_bytes=keep_bytes,
        window_bytes=UNIT,
        use_streams=use_streams,
    )
    watch = step(sizes, context)
    moved = sizes[: len(sizes) - kept_of(sizes, keep_last, keep_bytes)]
    stats = context.stats()
    assert (stats.copied_out.count, stats.copied_out.bytes) == (len(moved), sum(moved))
    for saved, uncopied in enumerate(watch.uncopied[: len(sizes)], start=1):
        assert uncopied <= keep_bytes + sum(sizes[:saved][saved - min(keep_last, saved) :])
    assert_nothing_left(context)


@every_mode
@pytest.mark.parametrize("kept", [0, 1, 4])
def test_the_peak_is_higher_by_what_is_kept(mode: str, kept: int) -> None:
    """One unit leaves, one arrives, one is in use, one was just saved; and those kept."""
    context = simulated(mode, keep_bytes=kept * UNIT, window_bytes=UNIT)
    for _ in range(2):
        assert step([UNIT] * 12, context).peak <= (kept + 4) * UNIT


@every_mode
def test_backward_fetches_into_what_it_freed(mode: str) -> None:
    """As many bytes ahead as the window and those that were kept."""
    context = simulated(mode, keep_bytes=4 * UNIT, window_bytes=UNIT)
    step([UNIT] * 12, context)
    assert context.stats().fetched_ahead_peak_bytes == 5 * UNIT
    assert context.stats().prefetch_misses.count == 0
    context = simulated(mode, window_bytes=UNIT)
    step([UNIT] * 12, context)
    assert context.stats().fetched_ahead_peak_bytes == UNIT
    assert context.stats().prefetch_misses.count <= 1


@every_mode
@pytest.mark.parametrize("dropped", [False, True])
def test_what_was_fetched_and_not_used_takes_no_room(mode: str, dropped: bool) -> None:
    """A backward that fails half way; then a graph's that is there, or the next step's."""
    context = simulated(mode, keep_bytes=4 * UNIT, window_bytes=UNIT)
    with context:
        other = forward([UNIT] * 12, Watch())[1]
    with context:
        middle = forward([UNIT] * 8, Watch())[1]
        out = middle * 1
        for _ in range(6):
            out = Saves.apply(out, UNIT, Watch())

    def fail(gradient: Tensor) -> None:
        raise KeyError("half way")

    middle.register_hook(fail)
    with pytest.raises(KeyError):
        out.sum().backward()
    assert context.stats().fetched_ahead_peak_bytes > 2 * UNIT
    if dropped:
        del middle, out
        collect()
    context.reset_stats()
    if dropped:
        other.sum().backward()
    else:
        step([UNIT] * 12, context)
    assert context.stats().prefetch_misses.count == 0
    assert context.stats().fetched_ahead_peak_bytes == 5 * UNIT


def test_nothing_is_freed_while_the_graph_is_retained() -> None:
    context = simulated("eager", keep_bytes=4 * UNIT, window_bytes=UNIT)
    with context:
        x, out = forward([UNIT] * 12, Watch())
    out.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert context.stats().fetched_ahead_peak_bytes == UNIT


@every_mode
def test_each_forward_keeps_its_own(mode: str) -> None:
    """Two graphs alive, and the same context again: what stays does not depend on other steps."""
    context = simulated(mode, keep_bytes=3 * UNIT, window_bytes=2 * UNIT)
    graphs = []
    for _ in range(2):
        with context:
            graphs.append(forward([UNIT] * 8, Watch())[1])
    assert context.stats().copied_out.count == 2 * 5
    for out in graphs:
        out.sum().backward()
    step([UNIT] * 8, context)
    assert context.stats().copied_out.count == 3 * 5


def test_units_that_ended_make_room() -> None:
    """A graph dropped within a forward: its bytes no longer count as kept."""
    context = simulated("eager", keep_bytes=4 * UNIT, window_bytes=UNIT)
    with context:
        dropped = forward([UNIT] * 3, Watch())
        first = forward([UNIT], Watch())
        del dropped
        second = forward([UNIT] * 3, Watch())
    assert context.stats().copied_out.count == 0
    del first, second


def test_auto_waits_for_more_than_stays_anyway() -> None:
    """The window and `keep_bytes`: with less, nothing is gained."""
    for units, copied in ((6, 0), (7, 3)):
        context = simulated(
            "eager", policy="auto", keep_bytes=4 * UNIT, window_bytes=2 * UNIT, keep_last=0
        )
        step([UNIT] * units, context)
        assert context.stats().copied_out.count == copied
        assert context.explain().startswith("On" if copied else "Off")


@dataclass(eq=False)
class Stub:
    """What of a unit counts here."""

    device: torch.device
    place: int
    nbytes: int
    pending: Any = None


def test_each_device_keeps_its_own() -> None:
    """`keep_last` counts units of all devices, `keep_bytes` bytes of each."""
    pending: Any = Pending()
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    devices = [first, first, second, first, second, second, first]
    units = [Stub(device, place, 10) for place, device in enumerate(devices)]
    for unit in units:
        pending.append(unit)
    assert (pending.bytes(first), pending.bytes(second)) == (40, 30)
    assert pending.all_bytes() == 70
    taken = list(pending.leaving(6, 20, lambda place: False))
    assert [unit.place for unit in taken] == [0, 2]
    assert (pending.bytes(first), pending.bytes(second)) == (30, 20)
    assert [unit.place for unit in pending.leaving(7, 10, lambda place: place == 4)] == [1, 3]
    units[6].nbytes = 25
    pending.measure(units[6])
    units[0].nbytes = 1000
    pending.measure(units[0])
    assert pending.bytes(first) == 25
    del unit, units[6]
    assert pending.bytes(first) == 0
    assert [unit.place for unit in pending.leaving(7, 0, lambda place: False)] == [4, 5]
