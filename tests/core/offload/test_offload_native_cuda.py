"""The native engine on a GPU: flat host memory, its ways out, its failures; see test_offload_cuda.

What it shares with torch's engine is tested there, for both.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import pytest
import torch
from test_offload_cuda import LAYERS, WIDTH, exact, layers, run

from lowpeak.offload import OffloadActivations, OffloadError
from lowpeak.offload.native_engine import NativeEngine
from lowpeak.offload.pinned_pool import MIB

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.native,
]
FOREVER = 1 << 40


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's backward adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def live_bytes(engine: NativeEngine) -> int:
    """Host bytes of saved tensors: without those of the ring."""
    copies = engine.copy_stats(device())
    live = engine.pool(device()).stats().live_bytes - copies["ring_bytes"]
    return live + copies["plain_live_bytes"]


def everything(engine: NativeEngine) -> OffloadActivations:
    return OffloadActivations(
        "all", keep_last=0, min_bytes=1, window_bytes=0, device_backend=engine
    )


def test_host_memory_is_pinned_used_again_and_given_back() -> None:
    blocks = layers()
    engine = NativeEngine()
    context = OffloadActivations("checkpoint_inputs", device_backend=engine)
    reserved = []
    for _ in range(4):
        run(blocks, context, checkpointed=True)
        reserved.append(engine.pool(device()).stats().reserved_bytes)
    assert reserved[1:] == [reserved[1]] * 3
    context.synchronize()
    assert engine.copy_stats(device())["leaving"] == 0
    assert engine.copy_stats(device())["copies_out"] >= 4 * (LAYERS - 4)
    assert live_bytes(engine) == 0
    assert engine.pool(device()).stats().pinned
    assert not engine.pool(device()).stats().integrated


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


@pytest.mark.parametrize("use_streams", [True, False])
def test_plain_memory_where_pinned_memory_is_refused(
    use_streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the ring, by functions of the host in the streams: the same gradients."""
    blocks = layers()[:4]
    plain, _ = run(blocks, nullcontext(), checkpointed=False)
    engine = NativeEngine(segment_bytes=64 * MIB, use_streams=use_streams)
    context = OffloadActivations("all", device_backend=engine, use_streams=use_streams)
    engine.release(engine.allocate(device(), MIB))
    for site in ("register_host", "allocate_host"):
        engine.pool(device())._native.fail_next(site, 0, FOREVER)
    for _ in range(3):
        ours, _ = run(blocks, context, checkpointed=False)
        assert exact(ours, plain)
    copies = engine.copy_stats(device())
    assert copies["plain_bytes_out"] > 10 * copies["ring_bytes"] > 0
    assert copies["plain_bytes_in"] > 0
    assert engine.pool(device()).stats().reserved_bytes == 64 * MIB
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "saved tensors go to plain memory" in caplog.text
    context.synchronize()
    assert live_bytes(engine) == 0


def test_idle_segments_go_back_to_the_system() -> None:
    engine = NativeEngine(segment_bytes=64 * MIB, idle_forwards=3)
    context = everything(engine)
    blocks = layers()[:2]
    run(blocks, context, checkpointed=False)
    many = engine.pool(device()).stats().reserved_bytes
    x = torch.randn(1 << 16, device="cuda", requires_grad=True)
    for _ in range(8):
        with context:
            out = x.sin().exp()
        out.sum().backward()
    stats = engine.pool(device()).stats()
    assert stats.reserved_bytes < many
    assert stats.idle_segments > 0
    assert stats.leaked_bytes == 0
    run(blocks, context, checkpointed=False)


@pytest.mark.slow
def test_a_soak_of_random_lengths() -> None:
    """Half a minute at most: bitwise the gradients of torch's engine, then flat memory.

    Also with forwards whose backward never runs.
    """
    blocks = layers()[:3]
    native = NativeEngine(segment_bytes=64 * MIB)
    contexts = [
        OffloadActivations("all", window_bytes=1 << 22, device_backend=backend)
        for backend in ("torch", native)
    ]
    generator = torch.Generator().manual_seed(0)
    reserved: list[tuple[int, int]] = []

    def step(context: OffloadActivations, length: int, backward: bool) -> list[torch.Tensor]:
        torch.manual_seed(length)
        blocks.zero_grad(set_to_none=True)
        state = torch.randn(2, length, WIDTH, device="cuda")
        with context:
            for block in blocks:
                state = block(state)
        if backward:
            state.square().mean().backward()
        return [p.grad.clone() for p in blocks.parameters() if p.grad is not None]

    end = time.monotonic() + 25
    while time.monotonic() < end and len(reserved) < 1500:
        # Log-uniform; now and then the longest, so that each third of the steps has it.
        share = float(torch.rand((), generator=generator))
        length = 1024 if len(reserved) % 50 == 0 else int(32 * math.exp(share * math.log(32)))
        backward = len(reserved) % 5 != 4
        by_torch, by_native = (step(context, length, backward) for context in contexts)
        assert exact(by_native, by_torch)
        stats = native.pool(device()).stats()
        reserved.append((stats.reserved_bytes, torch.cuda.memory_reserved()))
    assert len(reserved) > 150
    third = len(reserved) // 3
    for series in zip(*reserved, strict=True):
        assert max(series[third:]) <= 1.02 * max(series[:third])
    contexts[1].synchronize()
    assert live_bytes(native) == 0
    stats = native.pool(device()).stats()
    assert stats.peak_reserved_bytes <= 1.1 * stats.peak_live_bytes + 64 * MIB
    # Events are made while copies are in flight, not for each copy.
    copies = native.copy_stats(device())
    assert copies["events"] < copies["copies_out"]


def test_a_failed_copy_is_told_and_the_next_step_is_right() -> None:
    engine = NativeEngine(segment_bytes=64 * MIB)
    context = everything(engine)

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
    context = everything(engine)
    leaves = [torch.randn(1 << 20, device=f"cuda:{i}", requires_grad=True) for i in (1, 0)]
    with context:
        outs = [(leaf * 2).sin() for leaf in leaves]
    for leaf, out in zip(leaves, outs, strict=True):
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * (leaf.detach() * 2).cos(), rtol=0, atol=0)
        assert engine.copy_stats(leaf.device)["copies_out"] >= 1
