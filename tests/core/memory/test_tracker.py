"""track_memory: exact bytes of known allocations, nesting, errors, custom ops, whole steps."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.profiler import profile

from lowpeak.memory import MemoryPoint, track_memory, tracker


@torch.library.custom_op("lowpeak_test::scratch_sum", mutates_args=())
def scratch_sum(values: torch.Tensor) -> torch.Tensor:
    """Allocates eight times the bytes of `values` for a moment."""
    scratch = torch.empty(8 * values.numel(), dtype=values.dtype, device=values.device)
    scratch.fill_(1.0)
    return scratch[:1] * 2


def test_known_pattern_has_exact_bytes() -> None:
    with track_memory("cpu") as report:
        first = torch.empty(1000)
        second = torch.empty(500, dtype=torch.float64)
        del first
        third = torch.empty(7, dtype=torch.int8)
    assert report.start_bytes == 0
    assert [point.bytes for point in report.timeline] == [0, 4000, 8000, 4000, 4007, 4007]
    assert report.peak_bytes == report.peak_above_start_bytes == 8000
    assert report.end_bytes == second.nbytes + third.nbytes
    assert report.allocated_bytes == 8007
    assert report.allocation_count == 3


@pytest.mark.parametrize("numel", [1, 3, 1024, 49152 * 5 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_size_of_one_tensor_is_exact(numel: int, dtype: torch.dtype) -> None:
    with track_memory("cpu") as report:
        torch.empty(numel, dtype=dtype)
    assert report.peak_bytes == numel * dtype.itemsize
    assert report.end_bytes == 0


def test_timeline_is_ordered_and_spans_the_window() -> None:
    with track_memory("cpu") as report:
        for _ in range(50):
            torch.empty(10)
    times = [point.seconds for point in report.timeline]
    assert report.timeline[0] == MemoryPoint(0.0, 0)
    assert times == sorted(times)
    assert times[-1] == report.seconds
    assert report.allocation_count == 50
    assert report.peak_bytes == 40


def test_reading_the_recording_is_not_part_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1_000_000_000)

    def read(_: object) -> list[object]:
        clock.now += 7_000_000_000
        return []

    monkeypatch.setattr(tracker, "time", SimpleNamespace(time_ns=lambda: clock.now))
    monkeypatch.setattr(tracker, "_allocation_events", read)
    with track_memory("cpu") as report:
        clock.now += 2_000_000_000
    assert report.seconds == 2.0
    assert report.timeline[-1] == MemoryPoint(2.0, 0)


def test_allocation_inside_a_custom_op_is_counted() -> None:
    values = torch.ones(1000)
    with track_memory("cpu") as report:
        result = scratch_sum(values)
    assert report.peak_bytes >= 8 * 4000
    assert report.end_bytes == result.nbytes


def test_backward_is_counted_and_the_gradient_stays() -> None:
    weight = torch.ones(300, 200, requires_grad=True)
    with track_memory("cpu") as report:
        (weight * 2).square().sum().backward()
    assert weight.grad is not None
    assert report.end_bytes == weight.grad.nbytes
    assert report.peak_bytes >= 2 * weight.nbytes


def test_memory_from_before_the_window_is_neither_counted_nor_released() -> None:
    with track_memory("cpu"):
        earlier = torch.empty(1000)  # torch knows its size from this recording
    older = torch.empty(1000)
    with track_memory("cpu") as report:
        del earlier, older
        kept = torch.empty(10)
    assert [point.bytes for point in report.timeline] == [0, 40, 40]
    assert report.end_bytes == kept.nbytes


def test_nested_windows_each_count_their_own_memory() -> None:
    with track_memory("cpu") as outer:
        first = torch.empty(1000)
        with track_memory("cpu") as inner:
            del first
            second = torch.empty(500)
        third = torch.empty(10)
    assert [point.bytes for point in inner.timeline] == [0, 2000, 2000]
    assert [point.bytes for point in outer.timeline] == [0, 4000, 0, 2000, 2040, 2040]
    assert (inner.peak_bytes, outer.peak_bytes) == (2000, 4000)
    assert outer.end_bytes == second.nbytes + third.nbytes
    assert (inner.allocation_count, outer.allocation_count) == (1, 3)


def test_windows_may_close_out_of_order() -> None:
    first, second = track_memory("cpu"), track_memory("cpu")
    first_report = first.__enter__()
    torch.empty(10)
    second_report = second.__enter__()
    torch.empty(20)
    first.__exit__(None, None, None)
    torch.empty(30)
    second.__exit__(None, None, None)
    assert (first_report.peak_bytes, second_report.peak_bytes) == (80, 120)
    assert (first_report.allocation_count, second_report.allocation_count) == (2, 2)


def test_exception_passes_and_the_report_is_filled() -> None:
    with pytest.raises(KeyError, match="mine"), track_memory("cpu") as report:
        {"size": torch.empty(1000)}["mine"]
    assert report.peak_bytes == 4000
    assert report.end_bytes == 0
    with track_memory("cpu") as again:
        torch.empty(10)
    assert again.peak_bytes == 40


def test_report_of_an_open_window_refuses() -> None:
    with track_memory("cpu") as report:
        with pytest.raises(AttributeError, match="once the track_memory block ended"):
            _ = report.peak_bytes
        with pytest.raises(AttributeError, match="no attribute 'peek'"):
            _ = report.peek
    assert report.peak_bytes == 0


def test_running_profiler_is_refused_and_left_alone() -> None:
    with profile(use_kineto=True, profile_memory=True) as running:
        with pytest.raises(RuntimeError, match="already running"), track_memory("cpu"):
            pass
        torch.empty(1000)
    assert running.kineto_results is not None
    sizes = [event.nbytes() for event in running.kineto_results.events()]
    assert 4000 in sizes


def test_profiler_inside_the_block_is_an_error_not_a_wrong_number() -> None:
    with (
        pytest.raises(RuntimeError, match="another torch profiler ran inside"),
        track_memory("cpu"),
        profile(use_kineto=True),
    ):
        torch.empty(1000)
    with track_memory("cpu") as report:
        torch.empty(1000)
    assert report.peak_bytes == 4000


def test_window_in_another_thread_is_refused() -> None:
    failures: list[Exception] = []

    def enter() -> None:
        try:
            with track_memory("cpu"):
                pass
        except RuntimeError as error:
            failures.append(error)

    with track_memory("cpu"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert [str(error).startswith("track_memory is already open") for error in failures] == [True]


def test_unsupported_device_is_named() -> None:
    with pytest.raises(ValueError, match="got meta"), track_memory("meta"):
        pass


def test_default_device_is_where_torch_computes(device: torch.device) -> None:
    with track_memory() as report:
        torch.empty(1024, device=device)
    assert report.device.type == torch.device(device).type
    assert report.peak_above_start_bytes == 4096


def test_training_step_counts_logits_gradients_and_optimizer_state() -> None:
    """A step of a small Llama, some ten thousand events: states and logits are all there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (1, 256))
    with track_memory("cpu") as report:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))  # AdamW keeps a float32 step count for each
    assert report.end_bytes == 2 * parameter_bytes + steps
    logits_bytes = tokens.numel() * config.vocab_size * 4
    assert report.peak_bytes > 2 * logits_bytes
    assert report.allocation_count > 1000


@pytest.mark.cuda
def test_cuda_totals_are_those_of_the_caching_allocator() -> None:
    held = torch.empty(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight = torch.ones(512, 512, device="cuda", requires_grad=True)
    with track_memory("cuda") as report:
        scratch_sum(weight.detach().flatten())
        (weight @ weight).sum().backward()
    assert report.start_bytes == before + weight.nbytes
    assert report.start_bytes >= held.nbytes
    assert report.end_bytes == torch.cuda.memory_allocated()
    assert report.peak_bytes == torch.cuda.max_memory_allocated()
    assert max(point.bytes for point in report.timeline) == report.peak_bytes


@pytest.mark.cuda
def test_cuda_peak_of_the_window_is_found_below_an_older_peak() -> None:
    torch.empty(1 << 26, device="cuda")  # an older, higher peak, not reset
    peak = torch.cuda.max_memory_allocated()
    with track_memory("cuda") as report, track_memory("cpu") as host:
        kept = torch.empty(1 << 18, device="cuda")
        torch.empty(1 << 19, device="cuda")
    assert report.peak_above_start_bytes == (1 << 20) + (1 << 21)
    assert report.end_bytes - report.start_bytes == kept.nbytes
    assert report.allocation_count == 2
    assert torch.cuda.max_memory_allocated() == peak
    assert host.peak_bytes == 0
