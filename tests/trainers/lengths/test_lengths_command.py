"""``lowpeak lengths`` from its arguments to the table, the JSON and the picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiny
from datasets import Dataset

from lowpeak import cli
from lowpeak_trainers.lengths import advise, measure, summarise

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "packages/trainers/pyproject.toml").read_text())["project"]
COMMANDS = PROJECT["entry-points"][cli.COMMAND_GROUP]
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


@pytest.fixture(autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, value, cli.COMMAND_GROUP) for name, value in COMMANDS.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints(entries).select(group=group))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def conversations(count: int = 300) -> list[dict]:
    sizes = np.exp(np.random.default_rng(0).uniform(0.7, 5.5, count)).astype(int).tolist()
    return [
        {
            "messages": [
                {"role": "user", "content": tiny.words(tiny.random_ids(3, size))},
                {"role": "assistant", "content": tiny.words(tiny.random_ids(size, size))},
            ]
        }
        for size in sizes
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's tokenizer and config, and conversations."""
    monkeypatch.chdir(tmp_path)
    tiny.tokenizer().save_pretrained("model")
    Path("model/config.json").write_text('{"max_position_embeddings": 128}')
    lines = [json.dumps(row) + "\n" for row in conversations()]
    Path("chats.jsonl").write_text("".join(lines))
    return tmp_path


def lengths(*arguments: str) -> int:
    return cli.main(["lengths", "--dataset_name", "chats.jsonl", *arguments])


MODEL = ("--model_name_or_path", "model")


def test_table_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max_length", "256", "64", "--per_device_train_batch_size", "4", "--seed", "3"]
    assert lengths(*MODEL, *options, "--json", "out.json") == 0
    captured = capsys.readouterr()
    out = captured.out
    assert captured.err == "", "no bars where stderr is no terminal"
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 100
    found = measure(Dataset.from_list(conversations()), tiny.tokenizer())
    summary = summarise(found, [64, 256], batch_size=4, seed=3, position_limit=128)
    record = json.loads((folder / "out.json").read_text())
    assert record["format"] == "messages"
    rows = [line for line in out.splitlines() if " (" in line and line.startswith("  ")]
    assert record["distribution"]["tokens"] == int(found.tokens.sum())
    for got, wanted in zip(record["candidates"], summary.candidates, strict=True):
        assert got["cut_tokens"] == wanted.cut_tokens
        assert got["padding_random"] == wanted.padding_random
        assert [f["fill_ratio"] for f in got["fills"]] == [f.fill_ratio for f in wanted.fills]
        row = next(line for line in rows if line.split()[0] == str(wanted.max_length))
        share = 100 * wanted.cut_tokens / summary.distribution.tokens
        assert f"{share:.1f} %" in row
        assert row.rstrip().endswith(f"{100 * wanted.fill('wrapped').fill_ratio:.1f} %")
    advice = advise(summary)
    assert record["advice"]["arguments"] == advice.arguments
    assert f"Recommended: {advice.arguments}" in out
    assert "the model has 128 positions" in out
    assert "chats.jsonl, split train: 300 rows (messages)" in out


def test_a_stream_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lengths(*MODEL) == 0
    whole = capsys.readouterr()
    assert lengths(*MODEL, "--streaming") == 0
    assert capsys.readouterr() == whole


@pytest.mark.parametrize("streaming", [False, True])
def test_progress_on_a_terminal(
    streaming: bool,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    datasets.enable_progress_bars()  # a test before may have switched them off for the process
    assert lengths(*MODEL, *["--streaming"] * streaming) == 0
    captured = capsys.readouterr()
    assert re.search(r"Counting tokens.*300", captured.err)
    assert "Counting" not in captured.out


def test_samples_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lengths(*MODEL, "--max_rows", "50") == 0
    assert "50 rows drawn at random from 300 (messages)" in capsys.readouterr().out
    assert lengths(*MODEL, "--max_rows", "50", "--dataset_streaming") == 0
    assert "the first 50 rows (messages)" in capsys.readouterr().out


def test_default_candidates_end_with_the_positions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lengths(*MODEL, "--json", "out.json") == 0
    record = json.loads((folder / "out.json").read_text())
    assert [at["max_length"] for at in record["candidates"]][-1] == 128
    Path("model/config.json").write_text('{"text_config": {"max_position_embeddings": 90}}')
    assert lengths(*MODEL, "--json", "out.json") == 0
    assert json.loads((folder / "out.json").read_text())["position_limit"] == 90
    Path("model/config.json").unlink()
    assert lengths(*MODEL, "--json", "out.json") == 0
    assert json.loads((folder / "out.json").read_text())["position_limit"] is None


def test_pairs_have_no_packing_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "w7 w8 w9 ", "chosen": "w9", "rejected": "w7 " * n} for n in range(1, 60)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths(*MODEL, "--max_length", "3", "32") == 0
    out = capsys.readouterr().out
    assert "bfd" not in out
    assert "padding_free" in out
    assert "59 rows (preference)" in out
    assert "lost rows: the prompt fills max_length" in out


def test_tokenised_rows_and_another_template(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    assert lengths(*MODEL, "--chat_template_path", "short.jinja", "--json", "out.json") == 0
    short = json.loads((folder / "out.json").read_text())["distribution"]["tokens"]
    assert lengths(*MODEL, "--chat_template_path", "model", "--json", "out.json") == 0
    full = json.loads((folder / "out.json").read_text())["distribution"]["tokens"]
    assert full == short + 300 * 4, "a role and an end to each of two messages"
    Path("chats.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    capsys.readouterr()
    assert lengths() == 0
    assert "1 rows (tokenised)\ntokenised already" in capsys.readouterr().out


REFUSED = {
    "no model": ((), "--model_name_or_path is needed"),
    "no such folder": (("--model_name_or_path", "./nope"), "no such folder"),
    "offline": (("--model_name_or_path", "org/nope"), "no tokenizer of org/nope(?s:.*)hf auth"),
    "column": ((*MODEL, "--text_column", "body"), "no such column; there are messages"),
    "split": ((*MODEL, "--split", "dev"), "Unknown split"),
    "stream": ((*MODEL, "--streaming", "--num_proc", "2"), "one process"),
    "picture": ((*MODEL, "--plot", "out.pdf"), "the picture is a PNG"),
    "folder": ((*MODEL, "--json", "no/out.json"), "there is no folder no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_one_message(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[name]
    assert lengths(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert re.search(message, captured.err)


def test_no_row_has_a_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("chats.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    assert lengths(*MODEL) == 1
    assert "error: chats.jsonl: no row has a token" in capsys.readouterr().err


def test_without_matplotlib(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowpeak_trainers.lengths.command.plotting_available", lambda: False)
    assert lengths(*MODEL, "--plot", "out.png") == 1
    assert 'pip install "lowpeak-trainers[plot]"' in capsys.readouterr().err
    assert "plot" in PROJECT["optional-dependencies"]
    assert lengths(*MODEL) == 0


@needs_matplotlib
@pytest.mark.parametrize("kind", ["chats", "pairs", "one length"])
def test_the_picture_shows_something(kind: str, folder: Path) -> None:
    from matplotlib.image import imread

    rows = {
        "chats": conversations(),
        "pairs": [{"chosen": "w7 " * n, "rejected": "w8 " * (n + 3)} for n in range(1, 60)],
        "one length": [{"input_ids": [1] * 8}] * 3,
    }[kind]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths(*MODEL, "--plot", "out.png") == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(folder / "out.png")[..., :3]
    assert pixels.shape[0] > 900
    assert pixels.shape[1] > 1200
    # Each quarter has marks on white, and colours besides black and grey.
    for half in np.array_split(pixels, 2, axis=0):
        for quarter in np.array_split(half, 2, axis=1):
            assert (quarter.min(axis=-1) > 0.99).mean() > 0.3
            assert (np.ptp(quarter, axis=-1) > 0.2).mean() > 0.001


def test_the_installed_command(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    site = tmp_path_factory.mktemp("site")
    info = site / "lowpeak_trainers-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowpeak-trainers\nVersion: 0\n")
    lines = [f"[{cli.COMMAND_GROUP}]", *(f"{name} = {value}" for name, value in COMMANDS.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import sys; from lowpeak.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "lengths", "--dataset_name", "chats.jsonl", *MODEL]
    environment = {**os.environ, "PYTHONPATH": path, "HF_DATASETS_CACHE": str(site / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "300 rows (messages)" in done.stdout
    assert "Recommended: max_length=" in done.stdout
