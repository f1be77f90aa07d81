"""Every row of the parity table of lowpeak_bench: five steps as stock TRL, number by number."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from lowpeak_bench.parity import report
from lowpeak_bench.parity.cases import all_cases, loss_types
from lowpeak_bench.parity.harness import TOLERANCE
from lowpeak_bench.parity.run import moved, run_case, stock_logs

CASES = all_cases()
# With every loss at its defaults, what the default run covers; the others are slow together.
ALWAYS = {
    "SFT-nll-label_smoothing",
    "DPO-sigmoid-forward_kl",
    "DPO-nca_pair-use_weighting",
    "DPO-sigmoid-ld_alpha",
    "KTO-kto-precomputed",
    "KTO-kto-LoRA",
    "GRPO-dapo-KL",
    "GRPO-dapo-entropy_bonus",
    "GRPO-dapo-top_entropy_quantile",
    "GRPO-dapo-delta",
    "GRPO-dapo-off-policy_mask",
    "GRPO-vespo-old_log-probs",
    "GRPO-grpo-sequence_level,_old_log-probs",
    "RLOO-rloo-two_iterations",
    "RLOO-rloo-mixture_of_experts",
    "Distillation-JSD-LoRA",
    "Distillation-JSD-filled_to_16",
    "Reward-logsigmoid-filled_to_16",
}


@functools.cache
def default_logs(name):
    """What stock TRL logs for the default of one of the cases."""
    (case,) = [case for case in CASES if case.name == name]
    with tempfile.TemporaryDirectory() as folder:
        return stock_logs(case.default, Path(folder))


def marks(case):
    return () if not case.option or case.name in ALWAYS else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=marks(case)) for case in CASES]
)
def test_row(case, tmp_path):
    result = run_case(case, tmp_path)
    moves_by = moved(result.stock, default_logs(case.name)) if case.option else None
    assert report.judge(result, moves_by).fault == ""
    assert result.compared >= 40


def test_names_are_unique_and_complete():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= ALWAYS
    assert loss_types("DPO") == [
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sft",
        "sigmoid_norm",
    ]
    assert sorted(loss_types("GRPO")) == sorted(
        ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
    )


def test_a_wrong_number_is_a_fault(tmp_path):
    result = run_case(CASES[0], tmp_path)
    assert report.judge(result, None).fault == ""
    name, step = result.deviations[0].name, result.deviations[0].step
    wrong = type(result.deviations[0])(name, step, ours=1.0, stock=1.0 + 3 * TOLERANCE)
    nan = type(wrong)(name, step, ours=float("nan"), stock=1.0)
    for bad in (wrong, nan):
        spoilt = type(result)(result.case, (*result.deviations[1:], bad), result.stock)
        assert report.judge(spoilt, None).fault.startswith(f"{name} at step {step}: ")


def test_an_option_that_changes_nothing_is_a_fault(tmp_path):
    (case,) = [case for case in CASES if case.name == "SFT-nll-label_smoothing"]
    result = run_case(case, tmp_path)
    assert "changes nothing" in report.judge(result, 0.0).fault
    (alias,) = [case for case in CASES if case.name == "SFT-nll-chunked_nll_alias"]
    same = type(result)(alias, result.deviations, result.stock)
    assert "moves loss or gradient norm by 2.0e-01" in report.judge(same, 0.2).fault


def test_page_and_json(tmp_path):
    result = run_case(CASES[0], tmp_path)
    rows = [report.judge(result, None)]
    block = {"trl": "1", "transformers": "2", "torch": "3", "device": "cpu"}
    text = report.markdown(rows, block)
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{report.BEGIN}\nold\n{report.END}\nrest\n")
    report.write_markdown(page, text)
    assert page.read_text().startswith(f"# Title\n{report.BEGIN}\n1 pairs of runs")
    assert page.read_text().endswith(f"{report.END}\nrest\n")
    assert "old" not in page.read_text()
    assert "| nll " in text
    with pytest.raises(ValueError, match="lacks the lines"):
        report.write_markdown(tmp_path / "reference" / "config.json", text)
    report.write_json(tmp_path / "rows.json", rows, block)
    assert '"numbers_compared": 43' in (tmp_path / "rows.json").read_text()
