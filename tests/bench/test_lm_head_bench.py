"""The LM head benchmark computes what it says, for lowpeak and for every peer's call."""

import dataclasses
import io
import json
import sys
from types import ModuleType

import pytest
import torch

from lowpeak_bench import peers, tune_lm_head
from lowpeak_bench.lm_head import (
    FLOOR,
    Measurement,
    differentiate,
    find_shape,
    main,
    measure_head,
    render_results,
)
from lowpeak_bench.lm_head_reference import (
    HeadShape,
    float32_reference,
    make_problem,
    with_adapter,
)
from lowpeak_bench.plots import plot_lm_head

SHAPE = HeadShape("tiny", 300, 32)
BLANK = Measurement("tiny", 70, "trained", "")


@pytest.fixture
def problem(device: torch.device) -> peers.HeadProblem:
    return make_problem(SHAPE, 70, torch.float32, device, 0.2)


def float64_gradients(problem: peers.HeadProblem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    wide = peers.HeadProblem(
        problem.hidden.detach().double().requires_grad_(),
        problem.weight.detach().double().requires_grad_(),
        problem.targets,
    )
    evaluation, gradients = differentiate(peers.full_logits(None), wide)
    assert evaluation.log_probs is not None
    return evaluation.log_probs.detach(), gradients


def test_reference_agrees_with_float64(problem: peers.HeadProblem) -> None:
    log_probs, (hidden, weight) = float64_gradients(problem)
    reference = float32_reference(problem, rows=32)
    torch.testing.assert_close(reference.log_probs.double(), log_probs, rtol=1e-5, atol=1e-5)
    for name, gradient in (("hidden", hidden), ("weight", weight)):
        found = reference.gradients[name].double()
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-8)


def test_problem_has_normed_rows_and_the_asked_scale(problem: peers.HeadProblem) -> None:
    rms = problem.hidden.detach().square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms))
    assert problem.weight.std().item() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_all_that_run_here_are_right(problem: peers.HeadProblem, head: str) -> None:
    reference = float32_reference(problem)
    if head == "frozen":
        problem = problem._replace(weight=problem.weight.detach())
    implementations = [
        one
        for one in peers.baselines_and_peers() + peers.lowpeak_variants([None], [None], ["auto"])
        if "Liger" not in one.name and "CCE" not in one.name
    ]
    results = measure_head(problem, implementations, BLANK, reference, repeats=1, warmup=0)
    assert [one.implementation for one in results] == [FLOOR, *(o.name for o in implementations)]
    assert [one.failure for one in results] == [None] * len(results)
    for result in results[1:]:
        assert result.log_prob_error is not None
        assert result.log_prob_error < 1e-4
        assert result.hidden_gradient_error is not None
        assert result.hidden_gradient_error < 1e-4
        assert (result.weight_gradient_error is None) == (head == "frozen")
        assert (result.weight_gradient_error or 0.0) < 1e-4


def test_heads_with_an_adapter_are_right(problem: peers.HeadProblem) -> None:
    problem = with_adapter(problem, 4)
    assert problem.adapter is not None
    (a, b, _), scale = problem.adapter, problem.adapter.scale
    with torch.no_grad():
        added = scale * problem.hidden @ a.t() @ b.t()
        plain = problem.hidden @ problem.weight.t()
    assert float(added.std() / plain.std()) == pytest.approx(0.5, rel=0.2)

    wide = [problem.hidden, problem.weight, a, b]
    wide = [x.detach().double().requires_grad_(x is not problem.weight) for x in wide]
    logits = wide[0] @ (wide[1] + scale * wide[3] @ wide[2]).t()
    wanted = torch.nn.functional.cross_entropy(logits, problem.targets)
    gradients = torch.autograd.grad(wanted, [wide[0], wide[2], wide[3]])
    reference = float32_reference(problem, rows=32)
    assert list(reference.gradients) == ["hidden", "adapter_a", "adapter_b"]
    for found, right in zip(reference.gradients.values(), gradients, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-8)

    implementations = peers.peers_with_adapter()
    implementations += peers.lowpeak_variants([None], [None], ["auto"])
    results = measure_head(problem, implementations, BLANK, reference, repeats=1, warmup=0)
    assert [one.failure for one in results] == [None] * 7
    for result in results[1:]:
        errors = [
            result.loss_error,
            result.log_prob_error,
            result.hidden_gradient_error,
            result.adapter_a_gradient_error,
            result.adapter_b_gradient_error,
        ]
        assert all(error is not None and error < 1e-4 for error in errors)
        assert result.weight_gradient_error is None


def test_main_with_an_adapter_beside_other_heads(tmp_path, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    stream = io.StringIO()
    arguments = ["--shapes", "300x32", "--tokens", "40", "--repeats", "1", "--warmup", "0"]
    arguments += ["--heads", "lora", "frozen", "--lora-rank", "3", "--errors", "--only"]
    arguments += ["PEFT", "own dtype", "lowpeak, log", "--json", str(tmp_path / "a.json")]
    assert main([*arguments, "--device", device.type], stream) == 0
    lines = {line.split("|")[1].strip(): line for line in stream.getvalue().splitlines()[3:]}
    assert "dA error" in stream.getvalue()
    assert lines["full logits, own dtype"].split("|")[2].strip() == "-"
    assert lines["PEFT, full logits, own dtype"].split("|")[4].strip() == "-"
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["settings"]["lora_rank"] == 3
    names = [row["implementation"] for row in document["results"] if row["head"] == "lora"]
    peft = [f"PEFT, full logits, {dtype}" for dtype in ("own dtype", "float32")]
    assert names == [FLOOR, *peft, "lowpeak, log-probs"]


def test_a_failing_peer_is_shown_with_its_reason(problem: peers.HeadProblem) -> None:
    def load() -> peers.Evaluate:
        raise ImportError("no such peer (/some/where/on/disk)")

    broken = [peers.HeadImplementation("broken", load)]
    results = measure_head(problem, broken, BLANK, None, repeats=1, warmup=0)
    assert [one.failure for one in results] == [None, "ImportError: no such peer"]
    text = render_results(results, ["trained"], errors=False)
    assert "failed" in text
    assert "- broken: ImportError: no such peer\n" in text


def fake_liger() -> ModuleType:
    class LigerFusedLinearCrossEntropyLoss:
        """The signature of liger-kernel 0.8.5."""

        def __call__(self, lin_weight, _input, target, bias=None):  # type: ignore[no-untyped-def]
            return torch.nn.functional.cross_entropy(_input @ lin_weight.t(), target)

    module = ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss  # type: ignore[attr-defined]
    return module


def fake_cce(seen: list[object]) -> ModuleType:
    def linear_cross_entropy(  # type: ignore[no-untyped-def]
        e,
        c,
        targets,
        ignore_index=-100,
        softcap=None,
        reduction="mean",
        shift=False,
        filter_eps="high",
        impl="cce",
    ):
        """The signature of cut-cross-entropy 25.1.1."""
        seen.append((filter_eps, impl))
        return torch.nn.functional.cross_entropy(e @ c.t(), targets)

    module = ModuleType("cut_cross_entropy")
    module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    return module


def test_peers_without_a_cpu_path_are_called_rightly(
    problem: peers.HeadProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake_liger())
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", fake_cce(seen))
    log_probs, (hidden, weight) = float64_gradients(problem)
    chosen = [o for o in peers.baselines_and_peers() if "Liger" in o.name or "CCE" in o.name]
    assert len(chosen) == 3
    for implementation in chosen:
        evaluation, gradients = differentiate(implementation.load(), problem)
        torch.testing.assert_close(evaluation.loss.double(), -log_probs.mean())
        torch.testing.assert_close(gradients[0].double(), hidden, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(gradients[1].double(), weight, rtol=1e-4, atol=1e-7)
    assert seen == [(None, "cce"), ("high", "cce")]


def test_main_prints_a_table_and_writes_json_and_plot(tmp_path, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    stream = io.StringIO()
    arguments = ["--shapes", "300x32", "--tokens", "40", "--repeats", "1", "--warmup", "0"]
    arguments += ["--only", "full", "lowpeak", "--scratch-bytes", "1MiB", "--errors"]
    arguments += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main([*arguments, "--device", device.type], stream) == 0
    assert "| lowpeak, + entropy, 1 MiB" in stream.getvalue()
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["environment"]["torch"] is not None
    assert document["settings"]["tokens"] == 40
    # Two heads of: the floor, two dtypes of full logits, lowpeak with 2 outputs x 2 scratch sizes
    # and x 1 with the gradient expected.
    assert len(document["results"]) == 2 * (1 + 2 + 4 + 2)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_draws_a_point_for_each_known_memory(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.axes import Axes

    points: list[tuple[float, float]] = []
    monkeypatch.setattr(Axes, "scatter", lambda self, x, y, **_: points.append((x, y)))
    result = dataclasses.replace(
        BLANK, implementation="a", milliseconds=2.0, peak_bytes=9 << 20, extra_bytes=3 << 20
    )
    failed = dataclasses.replace(BLANK, implementation="b", failure="E: no")
    plot_lm_head([result, failed], tmp_path / "b.png")
    assert points == [(3.0, 2.0)]


def test_shape_names_and_sizes() -> None:
    assert find_shape("gemma-3-1b") == HeadShape("gemma-3-1b", 262144, 1152)
    assert find_shape("10x4") == HeadShape("10x4", 10, 4)
    with pytest.raises(ValueError, match="VxH such as 32000x2048"):
        find_shape("gemma")


def test_tile_sweep_uses_each_tile_in_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowpeak.lm_head import tiles

    plan_tiles, seen = tiles.plan_tiles, set()

    def spy(phase, *arguments):  # type: ignore[no-untyped-def]
        plan = plan_tiles(phase, *arguments)
        seen.add((phase, plan.rows, plan.columns))
        return plan

    monkeypatch.setattr(tiles, "plan_tiles", spy)
    stream = io.StringIO()
    arguments = ["--shapes", "512x32", "--tokens", "64", "--rows", "32", "--columns", "128"]
    arguments += ["--repeats", "1", "--warmup", "0", "--device", "cpu"]
    assert tune_lm_head.main(arguments, stream) == 0
    assert {("forward", 32, 128), ("backward", 32, 128)} <= seen
    assert stream.getvalue().count("| 32 x 128") == 2
