"""The public face of the offload helper: arguments, what is moved and what stays, reports."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowpeak.offload import (
    OffloadActivations,
    OffloadError,
    OffloadHostMemoryError,
    SavedTensor,
    SimEngine,
)

Context = torch.autograd.function.FunctionCtx
SHAPE = (16, 16)
BYTES = 16 * 16 * 4


def chain(x: Tensor, length: int = 6) -> Tensor:
    """Saves each intermediate result once: the input of every sine."""
    for _ in range(length):
        x = x.sin()
    return x


def start() -> Tensor:
    return torch.randn(SHAPE, requires_grad=True)


def offload(policy: object = "all", **options: object) -> OffloadActivations:
    chosen: dict[str, object] = {"min_bytes": BYTES, "device_backend": SimEngine(mode="eager")}
    return OffloadActivations(policy, **{**chosen, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "everything"}, "policy='everything' is none of"),
        ({"min_bytes": -1}, "min_bytes=-1 is below 0"),
        ({"keep_last": -2}, "keep_last=-2 is below 0"),
        ({"keep_bytes": -1}, "keep_bytes=-1 is below 0"),
        ({"window_bytes": -3}, "window_bytes=-3 is below 0"),
        ({"on_mutation": "ignore"}, "on_mutation='ignore' is neither"),
        ({"device_backend": "cuda"}, "device_backend='cuda' is none of"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OffloadActivations(**options)  # type: ignore[arg-type]


def test_torch_backend_needs_a_device() -> None:
    if torch.accelerator.is_available():
        assert OffloadActivations(device_backend="torch").explain().startswith("Nothing was saved")
        return
    with pytest.raises(ValueError, match="'auto' does nothing where there is none"):
        OffloadActivations(device_backend="torch")


def test_import_needs_neither_trl_nor_transformers_nor_triton() -> None:
    program = (
        "import sys, lowpeak.offload as o; o.OffloadActivations(device_backend='sim');"
        "sys.exit(str({'trl', 'transformers', 'triton', 'torch._dynamo'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stderr.strip() == "set()"


def test_stats_say_what_moved_and_what_stayed() -> None:
    context = offload(keep_last=1)
    x = start()
    with context:
        out = chain(x * 1, 5) * torch.ones(2, 1, 16)
    stats = context.stats()
    # x * 1 and four sines are saved by sines; the product saves its operand, a small constant.
    assert (stats.forwards, stats.offloaded.count, stats.copied_out.count) == (1, 5, 4)
    assert stats.copied_out.bytes == stats.host_bytes == 4 * BYTES
    assert set(stats.kept) == {"small"}
    out.sum().backward()
    stats = context.stats()
    assert (stats.copied_in.count, stats.forwarded.count) == (4, 1)
    assert stats.prefetch_misses.count + stats.prefetch_hits.count == 4
    # Backward freed the graph's handles, and with them the host's bytes.
    assert (stats.host_bytes, stats.host_peak_bytes) == (0, 4 * BYTES)
    context.reset_stats()
    assert context.stats() == OffloadActivations(device_backend="sim").stats()


@pytest.mark.parametrize(("keep_last", "copied"), [(0, 6), (1, 5), (4, 2), (9, 0)])
def test_the_last_ones_are_not_copied(keep_last: int, copied: int) -> None:
    context = offload(keep_last=keep_last)
    with context:
        out = chain(start() * 1)
    assert context.stats().copied_out.count == copied
    out.sum().backward()
    assert context.stats().forwarded.count == 6 - copied


def test_a_function_chooses_by_what_it_is_told() -> None:
    seen: list[SavedTensor] = []

    def second_only(saved: SavedTensor) -> bool:
        seen.append(saved)
        return len(seen) == 2

    context = offload(second_only, keep_last=0)
    with context:
        out = chain(start() * 1, 3)
    assert [saved.size for saved in seen] == [SHAPE] * 3
    assert all(saved.requires_grad and saved.nbytes == BYTES for saved in seen)
    assert not any(saved.is_checkpoint_input or saved.is_selective_save for saved in seen)
    assert context.stats().offloaded.count == 1
    assert context.stats().kept["policy"].count == 2
    out.sum().backward()


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda x: x.sin(),
    "conjugate": lambda x: (torch.complex(x, x).conj() * torch.complex(x, -x)).real,
    "empty": lambda x: (x[:0] * 1).sin(),
    "layout": lambda x: torch.sparse.mm((x * 1).to_sparse(), x),
}


@pytest.mark.parametrize("reason", KEPT)
def test_tensors_that_stay_are_counted_by_reason(reason: str) -> None:
    def gradient(context: OffloadActivations) -> Tensor:
        torch.manual_seed(0)
        x = start()
        with context:
            out = KEPT[reason](x)
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(OffloadActivations(device_backend="null"))
    context = offload(min_bytes=1, keep_last=0)
    assert torch.equal(gradient(context), plain)
    assert context.stats().kept[reason].count >= 1


def test_saves_during_a_backward_stay() -> None:
    context = offload(keep_last=0)
    x = start()
    with context:
        (first,) = torch.autograd.grad(chain(x * 1, 2).sum(), x, create_graph=True)
    assert context.stats().kept["in_backward"].count > 0
    first.sum().backward()


def test_half_empty_views_are_gathered() -> None:
    """A view that fills a quarter of its range costs a quarter; strides come back as they were."""
    seen: list[tuple[tuple[int, ...], Tensor]] = []

    class Remember(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx: Context, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append((x.stride(), x.clone()))
            return gradient.expand(x.shape)

    context = offload(min_bytes=1, keep_last=0)
    whole = start() * 1
    part = whole[:, 3:7]
    expected = part.detach().clone()
    with context:
        out = Remember.apply(part)
    assert context.stats().copied_out.bytes == expected.nbytes
    del whole, part
    out.backward()
    ((stride, value),) = seen
    assert stride == (16, 1)
    assert torch.equal(value, expected)


class Mix(torch.autograd.Function):
    """Saves three tensors at once, as attention does."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q * k * v

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        assert {value.stride() for value in (q, k, v)} == {(48, 1)}
        return gradient * k * v, gradient * q * v, gradient * q * k


def test_columns_of_one_storage_move_together() -> None:
    """Query, key and value cut out of one projection: one copy of the whole, not three gathers."""
    context = offload(min_bytes=1, keep_last=1)
    x = torch.randn(8, 48, requires_grad=True)
    q, k, v = (x * 1).chunk(3, dim=-1)
    (expected,) = torch.autograd.grad(Mix.apply(q, k, v).sum(), x, retain_graph=True)
    with context:
        out = Mix.apply(q, k, v).sum() + (torch.ones(64, requires_grad=True) * 1).sin().sum()
    stats = context.stats()
    assert (stats.deduplicated.count, stats.copied_out.count) == (2, 1)
    assert stats.copied_out.bytes == 8 * 48 * 4
    del q, k, v
    (gradient,) = torch.autograd.grad(out, x)
    assert torch.equal(gradient, expected)


def test_what_backward_asks_for_at_once_is_learnt() -> None:
    """The head's large result was copied in the first forward; afterwards it stays."""
    context = offload(keep_last=1, device_backend=SimEngine(mode="laziest"))
    wasted = []
    for _ in range(3):
        with context:
            body = chain(start() * 1, 4)
            head = body.repeat(1, 64).exp().log().sum()
        head.backward()
        wasted.append(context.stats().forwarded_after_copy.count)
        del body, head
    assert wasted[0] > 0
    assert wasted[1] == wasted[2]


def test_explain_and_trace_agree_with_the_counters() -> None:
    context = offload(keep_last=0)
    with context:
        out = chain(start() * 1, 4)
    out.sum().backward()
    text = context.explain()
    assert "Every large saved tensor is moved, as asked for (engine sim)." in text
    assert "4 tensors (4.0 KiB) were copied to the host and 4 tensors (4.0 KiB) back" in text
    events = json.loads(json.dumps(context.chrome_trace()))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sorted(span["name"] for span in spans if span["name"].startswith("in")) == [
        "in 0",
        "in 1",
        "in 2",
        "in 3",
    ]
    assert sum(span["args"]["bytes"] for span in spans) == 8 * BYTES


def test_h4_nothing_happens_without_a_device(caplog: pytest.LogCaptureFixture) -> None:
    context = OffloadActivations(device_backend="null")
    with caplog.at_level(logging.INFO, "lowpeak.offload"):
        for _ in range(2):
            x = start()
            with context, context:
                out = chain(x)
            out.sum().backward()
    assert context.stats().saved.count == 0
    assert len(caplog.records) == 1
    assert "Nothing is moved" in context.explain()
    context.synchronize()
    context.reset_stats()


def test_host_memory_error_names_the_limits() -> None:
    engine = SimEngine(host_limit=100)
    with pytest.raises(OffloadHostMemoryError, match="101 bytes do not fit: 0 of 100 are in use"):
        engine.allocate(torch.device("cpu"), 101)


def test_a_missing_wait_is_seen_by_the_simulated_device() -> None:
    """Without the computation's waits gradients are wrong, and the device says so."""
    wrong = 0
    for seed in range(8):
        torch.manual_seed(seed)
        x = start()
        chain(x * 1).sum().backward()
        plain, x.grad = x.grad, None
        engine = SimEngine(seed=seed, ignored_waits=("compute",))
        context = offload(keep_last=0, window_bytes=2 * BYTES, device_backend=engine)
        with context:
            out = chain(x * 1)
        out.sum().backward()
        assert plain is not None
        assert x.grad is not None
        wrong += not torch.equal(x.grad, plain) or bool(engine.violations)
    assert wrong > 0


@pytest.mark.parametrize("ignored", [(), ("copy_out",)])
def test_a_copy_back_waits_for_its_own_copy_out(ignored: tuple[str, ...]) -> None:
    engine = SimEngine(mode="laziest", ignored_waits=ignored)  # type: ignore[arg-type]
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    room = engine.allocate(source.device, 64)
    out = engine.copy_out(source, room)
    engine.wait(engine.copy_in(room, target, out), target)
    assert torch.equal(target, source) == (not ignored)


def test_r16_a_backward_of_moved_tensors_is_not_captured() -> None:
    """A replay would not run the copies back."""
    engine = SimEngine(mode="eager")
    context = offload(keep_last=0, device_backend=engine)
    with context:
        out = chain(start() * 1)
    engine.is_capturing = True
    with pytest.raises(OffloadError, match="asked for in the capture of a graph: capture forward"):
        out.sum().backward()
