"""Reports of memory that stayed: each condition again, by bytes and by weak references."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from offload_simulated import (
    ENGINES,
    MODES,
    WatchedEngine,
    assert_exact,
    assert_nothing_left,
    simulated,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowpeak.offload import OffloadActivations
from lowpeak.offload.engine import Copy

every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (16, 16)
BYTES = 16 * 16 * 4


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Only reference counts free anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def weak(value: Tensor) -> StorageWeakRef:
    return StorageWeakRef(value.untyped_storage())


def chain(x: Tensor, length: int, kept: list[StorageWeakRef]) -> Tensor:
    """sin after sin: each saves its input, which nobody else holds."""
    for _ in range(length):
        x = x.sin()
        kept.append(weak(x))
    return x


@every_mode
def test_r02_host_memory_is_flat_after_the_first_step(mode: str) -> None:
    """meta-pytorch/torchtune#2076: host memory grew with the steps (its allocations: on a GPU)."""
    context = simulated(mode)
    peaks = []
    for _ in range(4):
        x = torch.randn(SHAPE, requires_grad=True)
        with context:
            out = chain(x, 6, [])
        out.sum().backward()
        del out
        context.synchronize()
        peaks.append(context.stats().host_peak_bytes)
    assert 0 < peaks[0] <= 6 * BYTES
    assert peaks == [peaks[0]] * 4


@every_mode
def test_r04_tensors_that_are_never_unpacked(mode: str) -> None:
    """huggingface/trl#4280, #4236: the next step found the tracker not empty and raised."""
    context = simulated(mode)
    for _ in range(3):
        x = torch.randn(SHAPE, requires_grad=True)
        with context:
            used, unused = x.sin().tanh(), x.exp().cos()
        used.sum().backward()
        assert x.grad is not None
        del used, unused
        assert_nothing_left(context)


@every_mode
def test_r05_no_device_bytes_after_the_step(mode: str, without_collection: None) -> None:
    """huggingface/trl#5700: the stash kept 5 GB of device memory after the step."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    kept: list[StorageWeakRef] = []
    with context:
        out = chain(x, 8, kept)
    out.sum().backward()
    del out
    context.synchronize()
    assert not any(not storage.expired() for storage in kept)
    assert ENGINES[context].held() == 0


@every_mode
def test_r05_sources_go_while_the_graph_lives(mode: str) -> None:
    """The other half of it: once copied, a source is held by nobody, though the graph is alive."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    kept: list[StorageWeakRef] = []
    with context:
        out = chain(x, 8, kept)
    context.synchronize()
    assert [storage.expired() for storage in kept[:-1]] == [True] * 7
    assert context.stats().host_bytes == 7 * BYTES
    out.sum().backward()


@every_mode
def test_r06_part_of_the_graph_without_backward(mode: str, without_collection: None) -> None:
    """huggingface/trl#5730: experts without tokens left entries that were never freed."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    kept: list[StorageWeakRef] = []
    with context:
        used = chain(x, 2, [])
        unused = chain(x, 4, kept)
    used.sum().backward()
    context.synchronize()
    assert context.stats().host_bytes >= 3 * BYTES
    del unused, used
    context.synchronize()
    assert all(storage.expired() for storage in kept)
    assert context.stats().host_bytes == 0


@every_mode
@pytest.mark.parametrize("min_bytes", [1, 1 << 20], ids=["moved", "kept"])
def test_r24_live_outputs_make_no_cycle(
    mode: str, min_bytes: int, without_collection: None
) -> None:
    """pytorch/pytorch#189025, #115255: a hook that stores the output keeps its own graph alive."""
    context = simulated(mode, min_bytes=min_bytes)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = x.exp()
    kept = weak(out)
    context.synchronize()
    del out
    context.synchronize()
    assert kept.expired()
    assert context.stats().host_bytes == 0


@every_mode
def test_r24_context_holds_no_graph(mode: str, without_collection: None) -> None:
    """A graph dropped without backward goes with its last reference, while the context lives."""
    context = simulated(mode)
    kept: list[StorageWeakRef] = []
    with context:
        x = torch.randn(SHAPE, requires_grad=True)
        out = chain(x, 5, kept)
        del out
        context.synchronize()
        assert all(storage.expired() for storage in kept)
        assert context.stats().host_bytes == 0


@every_mode
def test_r28_bytes_copied_but_still_referenced_are_reported(mode: str) -> None:
    """facebookresearch/fairscale#947: another reference kept the tensor on the device."""
    context = simulated(mode, keep_last=1)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        held = x.sin()
        out = chain(held, 3, [])
    context.synchronize()
    assert context.stats().still_referenced.bytes == BYTES
    out.sum().backward()
    del held, out
    assert_nothing_left(context)


@pytest.mark.parametrize("window", [1, 3])
@every_mode
def test_r33_bytes_in_flight_are_bounded(mode: str, window: int) -> None:
    """axolotl#3733, #3776: all saved tensors in flight at once took more memory than none."""
    context = simulated(mode, window_bytes=window * BYTES)
    x = torch.randn(SHAPE, requires_grad=True)
    kept: list[StorageWeakRef] = []
    held = []
    with context:
        out = x
        for _ in range(12):
            out = chain(out, 1, kept)
            held.append(sum(not storage.expired() for storage in kept))
    # The window, the tensor whose copy has not begun, and the output itself.
    assert max(held) <= window + 2
    assert context.stats().in_flight_peak_bytes <= window * BYTES
    out.sum().backward()


class Notes(torch.autograd.Function):
    """The product with a saved tensor; on the way back it notes the storage that came."""

    restored: list[StorageWeakRef]
    alive: list[int]

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        out = x.sin()
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        Notes.restored.append(weak(x))
        Notes.alive.append(sum(not storage.expired() for storage in Notes.restored))
        return gradient * x.cos()


@every_mode
def test_r39_restored_tensors_go_with_their_layer(mode: str) -> None:
    """DeepSpeed#8282: every restored input stayed on the device until the context exited."""
    Notes.restored, Notes.alive = [], []
    context = simulated(mode, window_bytes=2 * BYTES)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = x * 1.0
        for _ in range(12):
            out = Notes.apply(out)
        out.sum().backward()
        assert max(Notes.alive) == 1
        assert all(storage.expired() for storage in Notes.restored)
    assert len(Notes.alive) == 12


@every_mode
def test_r39_prefetched_bytes_are_bounded(mode: str) -> None:
    """Leaving, arriving and in use: two windows and one, however many layers there are."""
    context = simulated(mode, window_bytes=2 * BYTES)
    peaks: list[int] = []

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0] * 1.0
        for _ in range(12):
            out = out.sin()
            out.register_hook(lambda _g: peaks.append(ENGINES[context].held() * BYTES))
        return out

    assert_exact(forward, [SHAPE], lambda: context)
    assert max(peaks) <= (2 + 2 + 1) * BYTES


@every_mode
def test_r39_a_retained_graph_holds_no_device_memory(mode: str) -> None:
    """Restored tensors go after each backward, though the graph may be asked again."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = chain(x, 8, [])
    context.synchronize()
    gradients = []
    for _ in range(3):
        gradients += torch.autograd.grad(out.sum(), [x], retain_graph=True)
        # All but the last of the chain's tensors were on the host when it began.
        assert ENGINES[context].held() == 0
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@every_mode
def test_r39_what_was_fetched_for_nothing_goes_with_the_next_forward(mode: str) -> None:
    """A backward that stops half way leaves its prefetched tensors no longer than that."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    kept: list[StorageWeakRef] = []
    with context:
        middle = chain(x, 4, kept)
        out = chain(middle, 4, [])
    context.synchronize()
    torch.autograd.grad(out.sum(), [middle], retain_graph=True)
    assert context.stats().fetched_ahead_peak_bytes >= 3 * BYTES
    with context:
        # `middle` and `out`, which the test holds, were copied from.
        assert ENGINES[context].held() <= 2
    expected = torch.autograd.grad(out.sum(), [x], retain_graph=True)
    again = torch.autograd.grad(out.sum(), [x])
    assert torch.equal(expected[0], again[0])


@every_mode
def test_r06_graph_dropped_while_copies_come_back(mode: str, without_collection: None) -> None:
    """Memory that a copy back still writes goes to the allocator only behind that copy."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        middle = chain(x, 4, [])
        out = chain(middle, 4, [])
    context.synchronize()
    torch.autograd.grad(out.sum(), [middle], retain_graph=True)
    del middle, out
    context.synchronize()
    assert ENGINES[context].violations == []
    assert ENGINES[context].held() == 0
    assert context.stats().host_bytes == 0


def test_r39_each_taker_waits_on_its_own_stream() -> None:
    """A restored tensor that two nodes share may be asked for on two streams: both wait."""
    waits: list[tuple[int, int]] = []

    class Noting(WatchedEngine):
        def wait(self, copy: Copy, memory: Tensor) -> None:
            waits.append((threading.get_ident(), id(copy)))
            super().wait(copy, memory)

    engine = Noting(mode="laziest")
    context = OffloadActivations(policy="all", min_bytes=1, keep_last=0, device_backend=engine)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        y = x * 2
        first, second = y.sin(), y.cos()
    del y
    context.synchronize()
    held = first.grad_fn._saved_self  # type: ignore[union-attr]
    taken: list[Tensor] = []
    thread = threading.Thread(target=lambda: taken.append(second.grad_fn._saved_self))  # type: ignore[union-attr]
    thread.start()
    thread.join()
    assert torch.equal(held, taken[0])
    assert engine.copies_in == 1
    assert {copy for _, copy in waits} == {waits[0][1]}
    assert [ident for ident, _ in waits] == [threading.get_ident(), thread.ident]


class Experts(nn.Module):
    """Four experts; a token goes to the one of its largest logit, and some get none (H5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        gate, choice = weights.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]).relu() * gate[rows, None])
        # A loss of the router that nobody asks for.
        self.unused = (weights.mean(0) * weights.mean(0)).exp()
        return x + out


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@every_mode
def test_h5_experts_without_tokens_and_evaluation_between_steps(
    mode: str, checkpointed: bool
) -> None:
    """trl#4280, #5730, torchtune#2709: the same gradients, and memory flat over 50 steps."""
    torch.manual_seed(5)
    layers = nn.ModuleList(Experts(16) for _ in range(2))
    context = simulated(mode, policy="checkpoint_inputs" if checkpointed else "all")

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            run = lambda v, layer=layer: checkpoint(layer, v, use_reentrant=False)  # noqa: E731
            x = run(x) if checkpointed and torch.is_grad_enabled() else layer(x)
        return x

    def step(offload: bool, seed: int) -> list[Tensor | None]:
        layers.zero_grad()
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))
        if offload:
            with context:
                loss = model(x).square().mean()
                with torch.no_grad():
                    model(x)
                model(x)  # evaluation that forgot no_grad
        else:
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad for p in layers.parameters()]

    reserved = []
    for seed in range(50):
        for ours, plain in zip(step(True, seed), step(False, seed), strict=True):
            assert (ours is None) == (plain is None)
            assert ours is None or plain is None or torch.equal(ours, plain)
        for layer in layers:
            del layer.unused
        context.synchronize()
        assert context.stats().host_bytes == 0
        assert ENGINES[context].held() == 0
        reserved.append(context.stats().host_peak_bytes)
    assert max(reserved[25:]) == reserved[24]
