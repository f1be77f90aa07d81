"""Timing, tables and the environment block of the benchmarks."""

import time

import pytest
import torch

from lowpeak_bench import table
from lowpeak_bench.environment import PACKAGES, environment, package_version
from lowpeak_bench.failures import reason
from lowpeak_bench.timing import interleaved_medians, peak_bytes


def test_rounds_rotate_and_the_median_leaves_warmup_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter(range(10**6))
    # each is run untimed before it is timed
    cost = {"a": [50, 100, 50, 5, 50, 1, 50, 9], "b": [70, 200, 70, 2, 70, 2, 70, 2]}

    def work(name: str) -> None:
        order.append(name)
        for _ in range(cost[name].pop(0)):
            next(clock)

    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 1e3)
    medians = interleaved_medians(
        [lambda: work("a"), lambda: work("b")], torch.device("cpu"), repeats=3, warmup=1
    )
    assert order == [name for name in "abbaabba" for _ in range(2)]
    # Reading the clock costs one tick.
    assert medians == pytest.approx([6.0, 3.0])


def test_no_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        interleaved_medians([], torch.device("cpu"), repeats=0, warmup=1)


@pytest.mark.cuda
def test_peak_is_above_what_was_there(device: torch.device) -> None:
    held = torch.empty(1 << 20, dtype=torch.uint8, device=device)

    def work() -> torch.Tensor:
        torch.empty(8 << 20, dtype=torch.uint8, device=device)
        return torch.empty(4 << 20, dtype=torch.uint8, device=device)

    assert peak_bytes(work, device) == 8 << 20
    del held


def test_peak_is_not_known_on_the_cpu() -> None:
    assert peak_bytes(lambda: None, torch.device("cpu")) is None


def test_table_aligns_and_refuses_ragged_rows() -> None:
    assert table.render(["a", "b"], [["xx", "1.0"], ["y", "22.0"]]) == (
        "| a   |    b |\n| --- | ---: |\n| xx  |  1.0 |\n| y   | 22.0 |\n"
    )
    with pytest.raises(ValueError, match="1 cells"):
        table.render(["a", "b"], [["x"]])


def test_sizes_are_read_and_written() -> None:
    assert [table.parse_bytes(text) for text in ("7", "2KiB", "64MiB")] == [7, 2048, 64 << 20]
    assert (table.mebibytes(3 << 20), table.gibibytes(3 << 29)) == ("3", "1.50")
    assert table.mebibytes(None) == table.number(None) == table.scientific(None) == "-"
    with pytest.raises(ValueError, match="64 MB"):
        table.parse_bytes("64 MB")


def test_environment_names_versions_and_no_path() -> None:
    block = environment()
    assert set(PACKAGES) <= set(block)
    assert block["torch"] == package_version("torch")
    assert not any("/" in str(value) for value in block.values())


def test_reason_is_one_line_without_paths() -> None:
    error = ImportError("cannot import name 'a' from 'b' (/home/x/b.py)\nmore")
    assert reason(error) == "ImportError: cannot import name 'a' from 'b'"
    assert reason(ValueError()) == "ValueError: "
