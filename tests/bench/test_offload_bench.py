"""The benchmark of activation offload on a tiny model: what it moves, counts and prints."""

import argparse
import io
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from lowpeak_bench.offload import (
    BASELINE,
    OffloadResult,
    Setting,
    main,
    parse_setting,
    parser,
    render_results,
    with_overheads,
)
from lowpeak_bench.offload_rows import KEEPING, LOWPEAK, ROWS, SAVE_ON_CPU, TRL, rows_for

# transformers 5.24 renames gradient_checkpointing_enable.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TOKENS = 48
HIDDEN, LAYERS = 32, 6
INPUT_BYTES = TOKENS * HIDDEN * 4
LAST = LOWPEAK[-1]
WITH_CHECKPOINTS = [row for row in ROWS if row != KEEPING]
SIMULATED = ["--device-backend", "sim", "--min-bytes", "0", "--window-bytes", "0"]
TINY = ["--config", "tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1"]


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    stream, target = io.StringIO(), tmp_path / "offload.json"
    status = main([*TINY, *arguments, "--json", str(target)], stream)
    document = json.loads(target.read_text())
    assert document["benchmark"] == "offload"
    assert document["environment"]["torch"] == version("torch")
    return status, document["results"], stream.getvalue()


def test_rows_move_what_they_say(tmp_path: Path) -> None:
    settings = ["--settings", f"{TOKENS}", f"{TOKENS}-plain"]
    status, results, text = run(tmp_path, *settings, *SIMULATED)
    assert status == 0
    found = {(one["checkpointing"], one["row"]): one for one in results}
    assert list(found) == [(True, row) for row in WITH_CHECKPOINTS] + [
        (False, row) for row in ROWS if row != "lowpeak checkpoint_inputs"
    ]
    for policy in LOWPEAK[:2]:
        # the input of the last layer stays, as backward begins with it
        assert found[True, policy]["bytes_out"] == (LAYERS - 1) * INPUT_BYTES
        assert found[True, policy]["bytes_back"] == (LAYERS - 1) * INPUT_BYTES
        assert found[True, policy]["host_bytes"] == (LAYERS - 1) * INPUT_BYTES
    assert found[True, LAST]["bytes_out"] > (LAYERS - 1) * INPUT_BYTES
    for checkpointing in (True, False):
        assert found[checkpointing, BASELINE]["bytes_out"] == 0
        everything = found[checkpointing, SAVE_ON_CPU]["bytes_out"]
        assert everything == found[checkpointing, SAVE_ON_CPU]["bytes_back"]
        # parameters are among what it copies, and nothing is copied once for several
        assert everything > found[checkpointing, LAST]["bytes_out"]
    plain = [one for one in results if not one["checkpointing"] and one["failure"] is None]
    moving = [one for one in plain if one["row"] not in (BASELINE, KEEPING)]
    assert min(one["bytes_out"] for one in moving) > LAYERS * INPUT_BYTES
    # all of it is less than that
    assert found[False, KEEPING]["bytes_out"] == 0
    norms = {one["gradient_norm"] for one in results if one["failure"] is None}
    assert len(norms) == 1
    assert f"| {TOKENS} " in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_row_that_fails_says_why(tmp_path: Path) -> None:
    """TRL's helper needs an accelerator; lowpeak's does nothing without one."""
    rows = ["--rows", BASELINE, TRL, "lowpeak auto"]
    status, results, text = run(tmp_path, "--settings", f"{TOKENS}", *rows)
    stock, ours = results[1:]
    assert status == 0
    # builds of torch for a CPU, and for CUDA
    nothing_there = ("AttributeError: 'NoneType' object has no", "AcceleratorError: CUDA error")
    assert stock["failure"].startswith(nothing_there)
    assert stock["seconds"] is None
    assert f"- {TOKENS} {TRL}: {stock['failure']}" in text
    assert ours["failure"] is None
    assert (ours["bytes_out"], ours["bytes_back"]) == (0, 0)
    assert ours["seconds"] > 0


def test_status_tells_that_lowpeak_failed(tmp_path: Path) -> None:
    rows = ["--rows", BASELINE, "lowpeak all", "--min-bytes", "-1"]
    status, results, _ = run(tmp_path, "--settings", f"{TOKENS}", *rows)
    assert status == 1
    assert results[0]["failure"] is None
    assert results[1]["failure"] == "ValueError: min_bytes=-1 is below 0"


def test_unknown_attention_fails_all_rows(tmp_path: Path) -> None:
    status, results, _ = run(tmp_path, "--settings", f"{TOKENS}", "--attention", "nonsense")
    assert status == 1
    assert [one["row"] for one in results] == WITH_CHECKPOINTS
    assert all("nonsense" in one["failure"] for one in results)


def test_overhead_is_above_none() -> None:
    def row(name: str, seconds: float | None) -> OffloadResult:
        return OffloadResult(64, True, name, seconds=seconds)

    rows = [row(BASELINE, 2.0), row("lowpeak all", 2.1), row(TRL, None)]
    plain, ours, failed = with_overheads(rows)
    assert plain.overhead is None
    assert ours.overhead == pytest.approx(0.05)
    assert failed.overhead is None
    assert " 5.0 |" in render_results([ours])
    assert with_overheads(rows[1:])[0].overhead is None


def test_settings_and_their_rows() -> None:
    assert parse_setting("8192-plain") == Setting(8192, checkpointing=False)
    assert Setting(8192, checkpointing=False).name == "8192-plain"
    default = [setting.name for setting in parser().parse_args([]).settings]
    assert sorted(default) == ["131072", "32768", "8192", "8192-plain"]
    for text in ("plain", "0", "8k"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no setting"):
            parse_setting(text)
    assert rows_for(True, 131072, None) == [BASELINE, "lowpeak auto", TRL, SAVE_ON_CPU]
    assert rows_for(True, 131072, ["lowpeak all"]) == ["lowpeak all"]
    assert KEEPING in rows_for(False, 8192, None)


def test_bytes_that_are_kept_are_not_copied(tmp_path: Path) -> None:
    settings = ["--settings", f"{TOKENS}-plain", "--rows", "lowpeak all", *SIMULATED]
    _, (everything,), _ = run(tmp_path, *settings)
    _, (keeping,), _ = run(tmp_path, *settings, "--keep-bytes", "64KiB")
    kept = everything["bytes_out"] - keeping["bytes_out"]
    assert 0 < kept <= 64 << 10
    assert keeping["bytes_back"] < everything["bytes_back"]
    assert keeping["gradient_norm"] == everything["gradient_norm"]


@pytest.mark.cuda
def test_peaks(tmp_path: Path) -> None:
    stream, target = io.StringIO(), tmp_path / "offload.json"
    tiny = ["--config", "tiny", "--settings", "2048", "2048-plain", "--repeats", "1"]
    small = ["--min-bytes", "0", "--window-bytes", "65536"]
    assert main([*tiny, *small, "--json", str(target)], stream) == 0
    results = json.loads(target.read_text())["results"]
    assert [one["failure"] for one in results] == [None] * len(results)
    for one in results:
        assert one["peak_bytes"] > 0
        assert (one["bytes_out"] > 0) == (one["row"] not in (BASELINE, KEEPING))
    found = {(one["checkpointing"], one["row"]): one["peak_bytes"] for one in results}
    assert found[False, "lowpeak all"] < found[False, BASELINE]


@pytest.mark.native
def test_rows_of_the_native_engine_move_the_same(tmp_path: Path) -> None:
    rows = ["--rows", LOWPEAK[1], f"{LOWPEAK[1]} native", f"{LAST} native", f"{KEEPING} native"]
    status, results, _ = run(tmp_path, "--settings", f"{TOKENS}", *rows, *SIMULATED)
    assert status == 0
    ours, native, everything, keeping = results
    assert keeping["bytes_out"] == 0
    for name in ("bytes_out", "bytes_back", "host_bytes", "gradient_norm"):
        assert ours[name] == native[name]
    assert everything["bytes_out"] > native["bytes_out"] == (LAYERS - 1) * INPUT_BYTES
