"""The helper beside others: subclasses, threads at once, other hooks, autocast, anomaly mode."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from offload_oracle import same, words
from offload_simulated import (
    ENGINES,
    MODES,
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
