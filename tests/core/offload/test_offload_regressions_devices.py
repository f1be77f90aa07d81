"""Reports that need streams, graphs or several devices: each condition again, on a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from offload_oracle import same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak.offload import OffloadActivations

pytestmark = pytest.mark.cuda
SHAPE = (512, 512)
BYTES = 512 * 512 * 4


def everything(**options: object) -> OffloadActivations:
    return OffloadActivations(policy="all", min_bytes=1, keep_last=0, **options)  # type: ignore[arg-type]


def chain(x: Tensor, length: int = 8) -> Tensor:
    for _ in range(length):
        x = x.sin().exp().tanh()
    return x


def plain_gradient(seed: int, device: str = "cuda") -> Tensor:
    x = leaf(seed, device)
    chain(x).sum().backward()
    assert x.grad is not None
    return x.grad


def leaf(seed: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("window_bytes", [None, BYTES])
@pytest.mark.parametrize("use_streams", [True, False])
def test_r01_sources_and_copies_under_memory_pressure(
    window_bytes: int | None, use_streams: bool
) -> None:
    """meta-pytorch/torchtune#1867: NaN from storage freed while its copy ran."""
    context = everything(window_bytes=window_bytes, use_streams=use_streams)
    for seed in range(5):
        x = leaf(seed)
        with context:
            out = chain(x)
            for _ in range(8):
                torch.full(SHAPE, float("nan"), device="cuda")
        out.sum().backward()
        assert same(x.grad, plain_gradient(seed))


def test_r02_no_pinned_allocation_after_the_first_steps() -> None:
    """meta-pytorch/torchtune#2076: pinned memory was allocated in every step."""
    context = everything()
    counts = []
    for seed in range(5):
        x = leaf(seed)
        with context:
            out = chain(x)
        out.sum().backward()
        context.synchronize()
        counts.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert counts[2:] == [counts[2]] * 3


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_r09_streams_are_read_when_used(where: str) -> None:
    """huggingface/trl#7195: the stream of the construction was used, not the current one."""
    context = everything()
    own = torch.cuda.Stream()
    for seed in range(4):
        x = leaf(seed)
        torch.cuda.synchronize()
        with (
            torch.cuda.stream(own if where != "backward" else torch.cuda.current_stream()),
            context,
        ):
            out = chain(x.view(256, 1024).t()).t()
        torch.cuda.synchronize()
        with torch.cuda.stream(own if where != "forward" else torch.cuda.current_stream()):
            out.sum().backward()
        torch.cuda.synchronize()
        expected = leaf(seed)
        chain(expected.view(256, 1024).t()).t().sum().backward()
        assert same(x.grad, expected.grad)


def test_r16_capture_keeps_tensors_on_the_device() -> None:
    """ROCm/TransformerEngine#721: offload inside a replayed graph gave garbage gradients."""
    context = everything()
    x = leaf(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            x.grad = None
            chain(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    with context:
        in_flight = chain(leaf(1))
    graph = torch.cuda.CUDAGraph()
    before = context.stats().offloaded.bytes
    with warnings.catch_warnings(record=True), torch.cuda.graph(graph), context:
        chain(x).sum().backward()
        del in_flight  # a graph that goes during the capture does not spoil it either
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert context.stats().offloaded.bytes == before
    assert same(x.grad, plain_gradient(0))


def test_r18_restored_tensors_belong_to_the_consumer() -> None:
    """pytorch/pytorch#106360: buffers of the copy stream's pool were freed while being read."""
    context = everything()
    for seed in range(4):
        x = leaf(seed)
        with context:
            out = chain(x)
        gradient = torch.ones(SHAPE, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.backward(gradient)
            churn = [torch.full(SHAPE, float("nan"), device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        del churn
        assert same(x.grad, plain_gradient(seed))


def test_r22_pack_does_not_wait_for_the_device() -> None:
    """pytorch/pytorch#159698, #175421: save_on_cpu blocked the host in every pack."""
    context = everything()
    x = leaf(0)
    for _ in range(2):
        with context:
            chain(x).sum().backward()
    context.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with context:
        out = chain(x)
    out.sum().backward()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.multigpu
def test_r27_r31_two_devices_in_one_graph() -> None:
    """unsloth-zoo#534, SimpleTuner#2521: slots, streams and devices were one per process."""
    context = everything()

    def run(x: Tensor) -> Tensor:
        y = chain(x.to("cuda:1"))
        return y.to("cuda:0") * chain(x) + chain(y.cpu()).to("cuda:0")

    for seed in range(3):
        ours, expected = leaf(seed, "cuda:0"), leaf(seed, "cuda:0")
        with context:
            out = run(ours)
        out.sum().backward()
        run(expected).sum().backward()
        assert same(ours.grad, expected.grad)


def test_r33_peak_is_the_windows_not_the_graphs() -> None:
    """axolotl#3733, #3776: offloading everything took 15 GB more than offloading nothing."""
    layers = 48

    def run(x: Tensor) -> Tensor:
        for _ in range(layers):
            x = checkpoint(lambda v: v.sin().exp().tanh(), x, use_reentrant=False)
        return x

    def peak(context: OffloadActivations | None) -> int:
        x = leaf(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        if context is None:
            run(x).sum().backward()
        else:
            with context:
                run(x).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - begin

    context = OffloadActivations(
        policy="checkpoint_inputs", min_bytes=1, keep_last=1, window_bytes=2 * BYTES
    )
    peak(context)
    ours, plain = peak(context), peak(None)
    assert plain >= layers * BYTES
    # Two windows, what one layer recomputes, and the last inputs: far below half of the layers'.
    assert ours <= 20 * BYTES
