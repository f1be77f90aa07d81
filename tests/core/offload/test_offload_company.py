"""The helper beside others: subclasses, threads at once, other hooks, autocast, anomaly mode."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from offload_oracle import same, words
from offload_simulated import (
    ENGINES,
    MODES,
    WatchedEngine,
    assert_exact,
    assert_nothing_left,
    gradients_under,
    simulated,
)
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lowpeak.offload import OffloadActivations

every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (16, 16)
BYTES = 16 * 16 * 4


def chain(x: Tensor) -> Tensor:
    return x.sin().exp().tanh().cos()


@every_mode
def test_wrapper_subclasses_move_by_their_leaves(mode: str) -> None:
    """R8: both inner tensors of a TwoTensor leave, and the wrapper comes back with its values."""

    def run(context: AbstractContextManager[object]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(SHAPE, generator=generator) for _ in range(2))
        x = TwoTensor(a, b).requires_grad_()
        with context:
            out = chain(x)
        out.sum().backward()
        gradient = x.grad
        assert isinstance(gradient, TwoTensor)
        return gradient.a, gradient.b

    context = simulated(mode)
    for ours, plain in zip(run(context), run(nullcontext()), strict=True):
        assert same(ours, plain)
    stats = context.stats()
    assert stats.subclasses.count >= 3
    # The results of exp and tanh, which two operations save each.
    assert stats.offloaded.bytes == 2 * 2 * BYTES
    assert_nothing_left(context)


@every_mode
def test_threads_at_once(mode: str) -> None:
    """Forward and backward of eight threads in one context, each with gradients of its own."""
    context = simulated(mode, window_bytes=2 * BYTES)
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for step in range(4):
            place = seed * 10 + step
            ours = gradients_under(context, lambda v: chain(v[0]), [SHAPE], seed=place)
            plain = gradients_under(nullcontext(), lambda v: chain(v[0]), [SHAPE], seed=place)
            if not same(ours[0], plain[0]):
                wrong.append(f"thread {seed}, step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_nothing_left(context)


@every_mode
def test_other_hooks_inside_and_outside(mode: str) -> None:
    """The innermost hooks get the tensors; around a context, theirs go on when it ends."""
    packed: list[int] = []

    def note(x: Tensor) -> Tensor:
        packed.append(x.numel())
        return x.detach()

    def forward(leaves: list[Tensor]) -> Tensor:
        first = chain(leaves[0])
        with saved_tensors_hooks(note, lambda x: x):
            second = chain(first)
        with save_on_cpu():
            third = chain(second)
        return chain(third)

    assert_exact(forward, [SHAPE], lambda: simulated(mode))
    assert len(packed) >= 3 * 3

    def surrounded(leaves: list[Tensor]) -> Tensor:
        with saved_tensors_hooks(note, lambda x: x):
            first = chain(leaves[0])
            with simulated(mode):
                second = chain(first)
            before = len(packed)
            third = chain(second)
        assert len(packed) > before
        return third

    ours = gradients_under(nullcontext(), surrounded, [SHAPE])
    plain = gradients_under(nullcontext(), lambda v: chain(chain(chain(v[0]))), [SHAPE])
    assert same(ours[0], plain[0])


@every_mode
@pytest.mark.parametrize("policy", ["all", "checkpoint_inputs"])
def test_autocast_and_late_checkpoint_stop(mode: str, policy: str) -> None:
    """bfloat16 copies of weights and activations; recomputation that runs to the region's end."""

    def forward(leaves: list[Tensor]) -> Tensor:
        x, weight = leaves
        region = lambda v: functional.linear(v, weight).relu()  # noqa: E731
        with torch.autocast("cpu", torch.bfloat16), set_checkpoint_early_stop(False):
            for _ in range(3):
                x = checkpoint(region, x.sin(), use_reentrant=False)
        return x.float()

    assert_exact(forward, [SHAPE, SHAPE], lambda: simulated(mode, policy=policy))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@every_mode
def test_errors_under_anomaly_detection(mode: str) -> None:
    """Torch ends the same message with another hint there."""

    def forward(leaves: list[Tensor]) -> Tensor:
        y = leaves[0] * 2
        out = y.sin()
        y.add_(1.0)
        return out

    def message(context: AbstractContextManager[object]) -> str:
        with (
            torch.autograd.detect_anomaly(check_nan=False),
            pytest.raises(RuntimeError) as raised,
        ):
            gradients_under(context, forward, [SHAPE])
        return words(raised.value)

    expected = message(nullcontext())
    assert "Good luck" in expected
    assert message(simulated(mode)) == expected


class OddLayouts(torch.autograd.Function):
    """Saves tensors whose bytes alone do not tell their values."""

    saved: tuple[Tensor, ...] = ()

    @staticmethod
    def tensors(x: Tensor) -> list[Tensor]:
        dense = x.detach().relu()
        half = torch.view_as_complex(dense.reshape(-1, 2))
        return [
            dense.to_sparse(),
            dense.to_sparse_csr(),
            half.conj(),
            half.conj().imag,
            torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
            dense.to_mkldnn(),
            torch.nested.nested_tensor([dense[:2], dense]),
            torch.empty(3, device="meta"),
        ]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(*OddLayouts.tensors(x))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        OddLayouts.saved = ctx.saved_tensors
        return gradients[0] * 2


@pytest.mark.filterwarnings("ignore")  # prototypes and deprecations of torch
@every_mode
def test_tensors_that_bytes_do_not_tell(mode: str) -> None:
    """R7: sparse, conjugated, quantised, nested and others pass through, as the kind they are."""
    x = torch.randn(SHAPE, requires_grad=True)
    with simulated(mode):
        out = OddLayouts.apply(x)
    out.sum().backward()
    for ours, expected in zip(OddLayouts.saved, OddLayouts.tensors(x), strict=True):
        assert ours.layout == expected.layout
        assert ours.is_conj() == expected.is_conj()
        assert ours.is_neg() == expected.is_neg()
        assert ours.dtype == expected.dtype
        assert ours.device == expected.device
        if expected.device.type == "meta":
            continue
        if expected.is_nested:
            pairs = list(zip(ours.unbind(), expected.unbind(), strict=True))
        elif expected.is_quantized:
            pairs = [(ours.int_repr(), expected.int_repr())]
        else:
            pairs = [(ours.to_dense(), expected.to_dense())]
        for a, b in pairs:
            assert same(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())


class NothingWhileCapturing(WatchedEngine):
    """Copies and events must not be touched while a graph is captured: it would be spoilt."""

    def done(self, copy: Any) -> bool:
        assert not self.is_capturing
        return super().done(copy)

    def wait(self, copy: Any, memory: Tensor) -> None:
        assert not self.is_capturing
        super().wait(copy, memory)

    def copy_out(self, source: Tensor, room: Any) -> Any:
        assert not self.is_capturing
        return super().copy_out(source, room)

    def copy_in(self, room: Any, target: Tensor, after: Any) -> Any:
        assert not self.is_capturing
        return super().copy_in(room, target, after)


@pytest.mark.parametrize("mode", ["laziest", "random"])
def test_nothing_is_touched_while_capturing(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Copies in flight, and a graph that is dropped, do not spoil a capture between two steps."""
    engine = NothingWhileCapturing(seed=0, mode=mode)
    context = OffloadActivations(policy="all", min_bytes=1, keep_last=0, device_backend=engine)
    ENGINES[context] = engine

    def step(seed: int) -> Tensor:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with context:
            return chain(x)

    plain = gradients_under(nullcontext(), lambda v: chain(v[0]), [SHAPE])
    dropped, before = step(1), context.stats().offloaded
    engine.is_capturing = True
    ours = gradients_under(context, lambda v: chain(v[0]), [SHAPE], inside=True)
    del dropped
    engine.is_capturing = False
    assert same(ours[0], plain[0])
    assert context.stats().offloaded == before
    assert context.stats().kept["capture"].count >= 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert_exact(lambda v: chain(v[0]), [SHAPE], lambda: context)


@every_mode
def test_contexts_of_any_order(mode: str) -> None:
    """Contexts entered and left as an ExitStack does, each several times, some never used."""
    first, second, unused = simulated(mode), simulated(mode), simulated(mode)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        with ExitStack() as stack:
            for context in (first, second, first, unused):
                stack.enter_context(context)
                out = out.sin()
        with second:
            out = out.exp()
        return out.tanh()

    plain = gradients_under(nullcontext(), lambda v: chain_of_contexts(v[0]), [SHAPE])
    for _ in range(2):
        ours = gradients_under(nullcontext(), forward, [SHAPE])
        assert same(ours[0], plain[0])
    for context in (first, second, unused):
        assert_nothing_left(context)
    assert ENGINES[first].copies_out > 0


def chain_of_contexts(x: Tensor) -> Tensor:
    return x.sin().sin().sin().sin().exp().tanh()


@every_mode
def test_a_context_that_is_gone_before_backward(mode: str) -> None:
    """R1: the graph holds all it needs; nobody has to keep the context."""
    plain = gradients_under(nullcontext(), lambda v: chain(v[0]), [SHAPE])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with simulated(mode):
        out = chain(x)
    (out * out).sum().backward()
    assert same(x.grad, plain[0])
