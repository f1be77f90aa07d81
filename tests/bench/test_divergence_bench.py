"""The divergence benchmark computes what it says, for lowpeak and for TRL's kernel."""

import io
import json
from pathlib import Path

import pytest
import torch

from lowpeak_bench import divergence_cases as cases
from lowpeak_bench import tune_divergence
from lowpeak_bench.divergence import differentiate, float32_reference, main
from lowpeak_bench.lm_head import HeadShape


@pytest.fixture
def pair(device: torch.device) -> cases.PairProblem:
    return cases.make_pair(HeadShape("tiny", 300, 32), 70, torch.float32, device, 0.2)


@pytest.mark.parametrize("name", cases.DIVERGENCES)
def test_all_agree_with_float64(name: str, pair: cases.PairProblem) -> None:
    pair = pair._replace(beta=cases.DIVERGENCES[name])
    wide = [x.detach().double() for x in pair[:4]]
    leaves = [x.requires_grad_() for x in wide[:2]]
    student, teacher = wide[0] @ wide[1].t(), wide[2] @ wide[3].t()
    expected = cases.divergence_of_logits(student, teacher, pair.beta).mean()
    gradients = torch.autograd.grad(expected, leaves)
    reference = float32_reference(pair, rows=32)
    assert abs(reference.loss - expected.item()) <= 1e-5
    found = {"reference": reference.gradients}
    for one in cases.implementations([None, 1 << 20], 300, "auto"):  # a table of all tokens
        pytest.importorskip("trl" if one.name == "TRL" else "torch")
        loss, found[one.name] = differentiate(one.load(), pair)
        assert abs(loss.item() - expected.item()) <= 1e-5, one.name
    for implementation, ours in found.items():
        for gradient, true in zip(ours, gradients, strict=True):
            assert (gradient.double() - true).abs().max() <= 1e-6, implementation


def test_run_writes_tables_and_json(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "divergence.json"
    arguments = ["--shapes", "300x16", "--tokens", "40", "--repeats", "1", "--warmup", "0",
                 "--dtype", "float32", "--device", "cpu", "--divergences", "jsd",
                 "--only", "lowpeak", "--top-k", "5", "--errors", "--json", str(path)]  # fmt: skip
    assert main(arguments, stream) == 0
    assert "300x16, 40 tokens, jsd, frozen head" in stream.getvalue()
    results = json.loads(path.read_text())["results"]
    assert len(results) == 2 * 4
    exact = [one for one in results if one["hidden_gradient_error"] is not None]
    assert len(exact) == 2 * 2
    assert all(one["hidden_gradient_error"] < 1e-5 for one in exact)


def test_sweep_tries_every_setting(tmp_path: Path) -> None:
    stream, path = io.StringIO(), tmp_path / "tune.json"
    arguments = ["--sweeps", "plan", "--shape", "300x16", "--tokens", "40", "--rows", "16", "40",
                 "--columns", "64", "300", "--repeats", "1", "--warmup", "0", "--dtype", "float32",
                 "--device", "cpu", "--divergences", "jsd", "--json", str(path)]  # fmt: skip
    assert tune_divergence.main(arguments, stream) == 0
    found = json.loads(path.read_text())["results"]
    settings = {"default", "two passes", "16 x 64", "16 x 300", "40 x 64", "40 x 300"}
    assert {one["setting"] for one in found} == settings
    assert all(one["failure"] is None for one in found)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")
def test_kernels_are_swept_through_triton(device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton ships with torch on Linux only")
    options = tune_divergence.parser().parse_args(
        ["--rows", "2", "--columns", "40", "--blocks", "16", "32", "--warps", "1", "--groups", "4",
         "--repeats", "1", "--warmup", "0", "--device", device.type]
    )  # fmt: skip
    for kernel in tune_divergence.KERNELS:
        found = tune_divergence.sweep_kernel(kernel, "jsd", options)
        assert [one.failure for one in found] == [None] * 3, found
