"""The benchmarks of host memory, in small and without a GPU: what they hold, count and print."""

import io
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from lowpeak_bench import host_memory, offload_soak
from lowpeak_bench.offload_soak import Window, grown, render_windows
from lowpeak_bench.table import MIB


@pytest.mark.native
def test_a_pool_of_plain_memory_is_measured(tmp_path: Path) -> None:
    stream, target = io.StringIO(), tmp_path / "rates.json"
    arguments = ["--device", "cpu", "--backend", "null", "--bytes", "16MiB", "--threads", "1", "2"]
    assert host_memory.main([*arguments, "--json", str(target)], stream) == 0
    document = json.loads(target.read_text())
    assert document["environment"]["torch"] == version("torch")
    assert [one["nbytes"] for one in document["results"]] == [16 * MIB] * 2
    for one in document["results"]:
        assert (one["what"], one["memory"]) == ("pin", "plain memory")
        assert one["rate"] == pytest.approx(16 / 1024 / one["seconds"])
    assert stream.getvalue().count("\n") == 4


@pytest.mark.native
def test_a_backend_that_is_not_there_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    stream = io.StringIO()
    arguments = ["--device", "cpu", "--backend", "hip", "--bytes", "16MiB", "--threads", "4"]
    assert host_memory.main(arguments, stream) == 1
    assert "- PinnedPool, 4 threads: " in stream.getvalue()


@pytest.mark.native
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers 5.24
def test_a_soak_in_small(tmp_path: Path) -> None:
    stream, target = io.StringIO(), tmp_path / "soak.json"
    arguments = ["--backend", "sim", "--device", "cpu", "--config", "tiny", "--dtype", "float32"]
    arguments += ["--window-bytes", "0", "--layers", "3", "--shortest", "4", "--longest", "32"]
    arguments += ["--minutes", "0.015", "--window-seconds", "0.3", "--json", str(target)]
    offload_soak.main(arguments, stream)  # other tests make the process grow at any time
    document = json.loads(target.read_text())
    windows = document["windows"]
    assert len(windows) == 3
    for window in windows:
        assert window["steps"] >= 1
        assert window["tokens"] >= 32
        assert window["host_live"] > 0
        assert window["host_reserved"] == windows[0]["host_reserved"] > window["host_live"]
        assert window["rss"] > 50 * MIB
    assert "host_reserved" not in document["grown"]
    assert stream.getvalue().startswith("| window | steps |")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers 5.24
def test_the_same_steps_without_offload() -> None:
    stream = io.StringIO()
    arguments = ["--backend", "none", "--device", "cpu", "--config", "tiny", "--dtype", "float32"]
    arguments += ["--layers", "2", "--longest", "32", "--shortest", "4", "--minutes", "0.001"]
    offload_soak.main([*arguments, "--window-seconds", "0.01"], stream)
    row = stream.getvalue().splitlines()[2].split("|")
    assert [cell.strip() for cell in row[4:7]] == ["-", "-", "-"], "nothing on the host"


def test_growth_is_what_is_over_two_percent_of_the_second_window() -> None:
    windows = [Window(1, 1, 1, 100, 100, 100) for _ in range(4)]
    windows[0] = Window(1, 1, 1, 1, 1, 1)
    assert grown(windows) == []
    windows[3] = Window(1, 1, 900, 103, 101, 102)
    assert grown(windows) == ["host_reserved"]
    windows[3].see(1, rss=103, host_reserved=None, device_reserved=7)
    assert grown(windows) == ["host_reserved", "rss"]
    assert render_windows(windows).count("\n") == 6
