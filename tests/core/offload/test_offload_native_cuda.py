"""The native engine on a GPU: the same gradients, the right streams, flat host memory."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from test_offload_cuda import INPUT, LAYERS, WIDTH, exact, layers, run

from lowpeak.native import native_available
from lowpeak.offload import OffloadActivations, OffloadError
from lowpeak.offload.native_engine import NativeEngine
from lowpeak.offload.pinned_pool import MIB

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not native_available() or sys.platform != "linux", reason="lowpeak._native is not built"
    ),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's backward adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("checkpointed", [True, False])
def test_gradients_are_exact_and_the_peak_is_lower(checkpointed: bool) -> None:
    blocks = layers()
    if checkpointed:
        # the gradients of all weights, 400 MB at the end of backward, would be the peak
        for parameter in blocks.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    plain, plain_peak = run(blocks, nullcontext(), checkpointed=checkpointed)
    engine = NativeEngine()
    context = OffloadActivations("auto", window_bytes=2 * INPUT, device_backend=engine)
    reserved = []
    for _ in range(4):
        ours, peak = run(blocks, context, checkpointed=checkpointed)
        assert exact(ours, plain)
        reserved.append(engine.pool(device()).stats().reserved_bytes)
    if checkpointed:
        assert plain_peak - peak >= (LAYERS - 6) * INPUT
    else:
        assert peak < 0.7 * plain_peak
    assert reserved[1:] == [reserved[1]] * 3
    assert context.stats().host_bytes == 0
    context.synchronize()
    assert engine.copy_stats(device())["leaving"] == 0
    assert engine.pool(device()).stats().live_bytes == 0
    assert engine.pool(device()).stats().pinned


def test_the_name_chooses_it() -> None:
    context = OffloadActivations("all", min_bytes=1, keep_last=0, device_backend="native")
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with context:
        out = x.sin().exp().sin()
    out.sum().backward()
    plain = x.detach().requires_grad_()
    plain.sin().exp().sin().sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
    assert "native" in context.explain()


def test_copies_overlap_nothing_they_should_wait_for() -> None:
    """The source is written late, by a slow kernel, and its memory used again at once."""
    engine = NativeEngine(segment_bytes=64 * MIB)
    context = OffloadActivations(
        "all", keep_last=0, min_bytes=1, window_bytes=0, device_backend=engine
    )
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


def test_a_late_copy_waits_for_the_stream_that_saved() -> None:
    """The first tensor is saved on one stream, its copy issued with another one current."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    context = OffloadActivations(
        "all", keep_last=1, min_bytes=1, window_bytes=1 << 30, device_backend=NativeEngine()
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


def test_host_memory_stays_flat_with_random_lengths() -> None:
    """Also with forwards whose backward never runs."""
    blocks = layers()[:3]
    engine = NativeEngine(segment_bytes=64 * MIB)
    context = OffloadActivations("all", window_bytes=1 << 22, device_backend=engine)
    generator = torch.Generator().manual_seed(0)
    lengths = [64 * int(n) for n in torch.randint(1, 9, (40,), generator=generator)]
    for step, length in enumerate([512, 512, *lengths]):
        x = torch.randn(2, length, WIDTH, device="cuda", requires_grad=True)
        with context:
            state = x
            for block in blocks:
                state = block(state)
        if step % 5:
            state.square().mean().backward()
        del state, x
        blocks.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    context.synchronize()
    stats = engine.pool(device()).stats()
    assert stats.live_bytes == 0
    assert stats.peak_reserved_bytes <= 1.1 * stats.peak_live_bytes + 128 * MIB
    # Events are made while copies are in flight, not for each copy.
    copies = engine.copy_stats(device())
    assert copies["events"] < copies["copies_out"]


def test_a_failed_copy_is_told_and_the_next_step_is_right() -> None:
    engine = NativeEngine(segment_bytes=64 * MIB)
    context = OffloadActivations(
        "all", keep_last=0, min_bytes=1, window_bytes=0, device_backend=engine
    )

    def step() -> torch.Tensor | None:
        x = torch.linspace(-1, 1, 1 << 20, device="cuda", requires_grad=True)
        with context:
            out = x.sin().exp().sin()
        out.sum().backward()
        return x.grad

    right = step()
    engine._engine(device()).fail_next("copy_in")
    with pytest.raises(OffloadError, match="injected"):
        step()
    again = step()
    assert right is not None
    assert again is not None
    assert torch.equal(right, again)


@pytest.mark.multigpu
def test_each_device_has_streams_and_memory_of_its_own() -> None:
    engine = NativeEngine(segment_bytes=64 * MIB)
    context = OffloadActivations(
        "all", keep_last=0, min_bytes=1, window_bytes=0, device_backend=engine
    )
    leaves = [torch.randn(1 << 20, device=f"cuda:{i}", requires_grad=True) for i in (1, 0)]
    with context:
        outs = [(leaf * 2).sin() for leaf in leaves]
    for leaf, out in zip(leaves, outs, strict=True):
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * (leaf.detach() * 2).cos(), rtol=0, atol=0)
        assert engine.copy_stats(leaf.device)["copies_out"] >= 1
