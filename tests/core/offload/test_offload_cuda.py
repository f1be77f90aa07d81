"""What only a device with an allocator of its own can show: bytes, streams, growth; each engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak.offload import OffloadActivations
from lowpeak.offload.native_engine import NativeEngine
from lowpeak.offload.pinned_pool import MIB

NATIVE = pytest.param("native", marks=pytest.mark.native)
pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("engine", ["torch", NATIVE])]

WIDTH = 1024
ROWS = 4096
LAYERS = 12
INPUT = ROWS * WIDTH * 4


def offload(
    engine: str, policy: Any = "all", *, use_streams: bool = True, **options: Any
) -> OffloadActivations:
    backend: Any = engine
    if engine == "native":
        # Segments that the tests can fill; by its name it takes 256 MiB at a time.
        backend = NativeEngine(segment_bytes=64 * MIB, use_streams=use_streams)
    return OffloadActivations(policy, use_streams=use_streams, device_backend=backend, **options)


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer
    made = [
        block(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, device="cuda")
        for _ in range(LAYERS)
    ]
    return torch.nn.ModuleList(made)


def run(
    blocks: torch.nn.ModuleList, context: AbstractContextManager[object], *, checkpointed: bool
) -> tuple[list[Tensor], int]:
    """Gradients, and the peak above the start."""
    blocks.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x = torch.randn(8, ROWS // 8, WIDTH, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with context:
        state = x * 1
        for block in blocks:
            state = checkpoint(block, state, use_reentrant=False) if checkpointed else block(state)
        loss = state.square().mean()
    loss.backward()
    torch.cuda.synchronize()
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]
    gradients = [x.grad, *(parameter.grad for parameter in trained)]
    assert all(gradient is not None for gradient in gradients)
    return gradients, torch.cuda.max_memory_allocated() - before  # type: ignore[return-value]


def exact(ours: list[Tensor], plain: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's backward adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("policy", ["auto", "all", "checkpoint_inputs"])
def test_gradients_are_exact_and_the_peak_is_lower(
    engine: str, policy: str, checkpointed: bool, use_streams: bool
) -> None:
    blocks = layers()
    if checkpointed:
        # the gradients of all weights, 400 MB at the end of backward, would be the peak
        for parameter in blocks.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    plain, plain_peak = run(blocks, nullcontext(), checkpointed=checkpointed)
    context = offload(engine, policy, use_streams=use_streams, window_bytes=2 * INPUT)
    for _ in range(3):
        ours, peak = run(blocks, context, checkpointed=checkpointed)
        assert exact(ours, plain)
    if checkpointed:
        # All inputs but those in the window, the last and the one in use.
        assert plain_peak - peak >= (LAYERS - 6) * INPUT
        assert context.stats().copied_out.count >= 3 * (LAYERS - 3)
    elif policy != "checkpoint_inputs":
        assert peak < 0.7 * plain_peak
    assert context.stats().host_bytes == 0
    assert engine in context.explain()


def test_backward_on_another_stream_and_device_state_is_exact(engine: str) -> None:
    blocks = layers()
    plain, _ = run(blocks, nullcontext(), checkpointed=True)
    context = offload(engine, "checkpoint_inputs", window_bytes=2 * INPUT)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours, _ = run(blocks, context, checkpointed=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert exact(ours, plain)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_contexts_before_one_backward(engine: str, order: tuple[int, int]) -> None:
    blocks = layers()

    def losses(contexts: list[AbstractContextManager[object]]) -> list[Tensor]:
        blocks.zero_grad(set_to_none=True)
        made = []
        for seed, context in enumerate(contexts):
            torch.manual_seed(seed)
            state = torch.randn(4, 256, WIDTH, device="cuda")
            with context:
                for block in blocks:
                    state = checkpoint(block, state, use_reentrant=False)
                made.append(state.square().mean())
        return [made[index] for index in order]

    def gradients(make: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
        for loss in losses([make(), make()]):
            loss.backward()
        return [p.grad for p in blocks.parameters() if p.grad is not None]

    plain = gradients(nullcontext)
    assert exact(gradients(lambda: offload(engine, min_bytes=1, window_bytes=1 << 20)), plain)


def test_h5_nothing_grows_over_fifty_steps(engine: str) -> None:
    """Also with forwards whose backward never runs, of changing lengths."""
    blocks = layers()[:3]
    context = offload(engine, window_bytes=1 << 22)
    allocated: list[int] = []
    for step in range(50):
        x = torch.randn(2, 64 * (1 + step % 4), WIDTH, device="cuda", requires_grad=True)
        with context:
            state = x
            for block in blocks:
                state = block(state)
        if step % 5:
            state.square().mean().backward()
        del state, x
        blocks.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    # The workspaces of cuBLAS are made in the first steps.
    assert max(allocated[10:]) == allocated[10]
    assert context.stats().host_bytes == 0


@pytest.mark.parametrize("use_streams", [True, False])
def test_copies_overlap_nothing_they_should_wait_for(engine: str, use_streams: bool) -> None:
    """The source is written late, by a slow kernel, and its memory used again at once."""
    context = offload(engine, use_streams=use_streams, keep_last=0, min_bytes=1, window_bytes=0)
    for _ in range(10):
        x = torch.randn(1 << 22, device="cuda", requires_grad=True)
        torch.cuda._sleep(20_000_000)
        with context:
            out = (x * 2).sin()
        torch.cuda._sleep(1_000_000)
        noise = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
        del noise
        out.sum().backward()
        torch.testing.assert_close(x.grad, 2 * (x.detach() * 2).cos(), rtol=0, atol=0)


@pytest.mark.parametrize("use_streams", [True, False])
def test_a_late_copy_waits_for_the_stream_that_saved(engine: str, use_streams: bool) -> None:
    """The first tensor is saved on one stream, its copy issued with another one current."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    context = offload(
        engine, use_streams=use_streams, keep_last=1, min_bytes=1, window_bytes=1 << 30
    )
    for _ in range(10):
        x = torch.randn(1 << 20, device="cuda", requires_grad=True)
        y = torch.randn(1 << 20, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        with context:
            with torch.cuda.stream(first):
                torch.cuda._sleep(20_000_000)
                one = (x * 2).sin()
            with torch.cuda.stream(second):
                two = (y * 2).sin()
        torch.cuda.synchronize()
        (one.sum() + two.sum()).backward()
        torch.cuda.synchronize()
        torch.testing.assert_close(x.grad, 2 * (x.detach() * 2).cos(), rtol=0, atol=0)
