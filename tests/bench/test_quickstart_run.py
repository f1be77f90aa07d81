"""Runs of the quickstart on a tiny random model: both sides train alike, and memory is seen."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quickstart_tiny as tiny
import torch

from lowpeak.memory import MemoryPoint
from lowpeak_bench.quickstart import run
from lowpeak_bench.quickstart.compare import Comparison
from lowpeak_bench.quickstart.measure import state_bytes, storage_bytes, thin
from lowpeak_bench.quickstart.rollouts import count_differing, until_end
from lowpeak_bench.quickstart.settings import STEP_SIZES, TRAINERS, RunSettings, StepSize

# Raised by TRL, transformers and what they import.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SMALL = {
    "sft": StepSize(rows=2, tokens_per_row=256),
    "dpo": StepSize(rows=4, tokens_per_row=256),
    "grpo": StepSize(rows=4, tokens_per_row=256, completion_tokens=12),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("tiny"))


def variety_reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Distinct characters: a random model says no numbers, and equal rewards train nothing."""
    return [float(len(set(messages[-1]["content"]))) for messages in completions]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowpeak_bench.quickstart.settings.STEP_SIZES", SMALL)
    monkeypatch.setattr("lowpeak_bench.quickstart.data.arithmetic_reward", variety_reward)


def train(model: Path, folder: Path, trainer: str, side: str) -> dict[str, Any]:
    """Two steps in this process."""
    settings = RunSettings(trainer, side, str(model), str(folder), steps=2, seed=0, device="cpu")
    run.main(str(settings.write()))
    result: dict[str, Any] = json.loads(settings.result_path.read_text())
    return result


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.usefixtures("small_steps")
def test_both_sides_train_alike(trainer: str, model_folder: Path, tmp_path: Path) -> None:
    stock = train(model_folder, tmp_path, trainer, "trl")
    ours = train(model_folder, tmp_path, trainer, "lowpeak")
    comparison = Comparison(trainer, stock, ours)
    assert comparison.problems == []
    assert len(ours["steps"]) == 2
    for result in (stock, ours):
        parameters = sum(p.nbytes for p in tiny_parameters(model_folder))
        models = 2 if trainer == "dpo" else 1  # DPO has a reference model
        first, second = result["steps"]
        # AdamW's two moments and step counts are there from the second step on.
        assert first["state_bytes"] >= models * parameters
        grown = second["state_bytes"] - first["state_bytes"]
        assert 2 * parameters <= grown <= 2 * parameters + 4 * 100
        assert first["peak_bytes"] >= first["state_bytes"] + 3 * parameters  # gradients too
        for step in result["steps"]:
            assert 0 < step["backward_seconds"] < step["timeline"][-1][0]
            kept = step["backward_peak_bytes"] - step["state_bytes"]
            assert parameters <= kept <= step["peak_bytes"] - step["state_bytes"]
        assert all(step["grad_norm"] > 0 for step in result["steps"])
        assert max(live for _, live in second["timeline"]) == second["peak_bytes"]
    if trainer == "grpo":
        recorded = json.loads((tmp_path / "grpo-completions.json").read_text())
        assert [len(rows) for rows in recorded] == [4, 4]
        assert stock["differing_tokens"] == [None, None]
        assert ours["differing_tokens"] == [0, 0]


def tiny_parameters(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(folder).parameters())


@pytest.mark.usefixtures("small_steps")
def test_lowpeak_trains_on_the_recorded_completions_and_says_what_it_sampled(
    model_folder: Path, tmp_path: Path
) -> None:
    stock = train(model_folder, tmp_path, "grpo", "trl")
    path = tmp_path / "grpo-completions.json"
    recorded = json.loads(path.read_text())
    recorded[0][0] = [5, 6, 7]
    path.write_text(json.dumps(recorded))
    ours = train(model_folder, tmp_path, "grpo", "lowpeak")
    assert ours["differing_tokens"][0] > 0
    assert ours["steps"][0]["grad_norm"] != stock["steps"][0]["grad_norm"]
    assert json.loads(path.read_text()) == recorded


@pytest.mark.parametrize("trainer", TRAINERS)
def test_steps_stay_within_the_promised_tokens(trainer: str) -> None:
    assert STEP_SIZES[trainer].tokens <= 2048


def test_thin_keeps_extremes_and_order() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 10**9, (5000,), generator=generator).tolist()
    points = [MemoryPoint(0.001 * index, level) for index, level in enumerate(levels)]
    kept = thin(points, 50)
    assert len(kept) <= 2 * 51 + 2
    assert max(kept, key=lambda point: point.bytes) == max(points, key=lambda point: point.bytes)
    assert min(kept, key=lambda point: point.bytes) == min(points, key=lambda point: point.bytes)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert [point.seconds for point in kept] == sorted(point.seconds for point in kept)
    assert thin(points[:20], 50) == points[:20]


def test_state_counts_shared_storages_once() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    optimizer = torch.optim.AdamW([first.weight])
    assert state_bytes([first, second], optimizer) == 64
    first.weight.square().sum().backward()
    optimizer.step()
    assert state_bytes([first, second], optimizer) == 4 * 64 + 4
    assert storage_bytes([torch.zeros(10)[:2]]) == 40


def test_completions_end_with_the_first_end_token() -> None:
    assert until_end([5, 2, 6, 2], end=2) == [5, 2]
    assert until_end([5, 6], end=2) == [5, 6]


def test_differing_tokens_are_counted_with_missing_ones() -> None:
    assert count_differing([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert count_differing([[1, 9, 3], [4]], [[1, 2], [4, 5, 6]]) == 1 + 1 + 2


def quickstart(model: Path, trainers: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One step by the command that the README names."""
    command = [sys.executable, "-m", "lowpeak_bench.quickstart", "--steps", "1"]
    command += ["--model", str(model), "--trainers", trainers, "--output-dir", str(folder)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_one_command_trains_and_reports(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    done = quickstart(model_folder, "sft", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step/s" not in done.stderr  # tqdm's bar is off
    assert "| SFT " in done.stdout
    assert "Losses and gradient norms agree." in done.stdout
    record = json.loads((folder / "results.json").read_text())
    assert [result["side"] for result in record["results"]] == ["trl", "lowpeak"]
    assert record["environment"]["trl"] is not None
    assert record["settings"]["model"] == model_folder.name
    assert str(tmp_path) not in json.dumps(record)
    assert "data:image/svg+xml;base64," in (folder / "report.html").read_text()


def test_failing_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    folder = tmp_path / "report"
    done = quickstart(tmp_path, "dpo", folder)
    assert done.returncode == 2
    assert "DPO with TRL ended with exit status 1" in done.stderr
    assert "no-such-model" in done.stderr
