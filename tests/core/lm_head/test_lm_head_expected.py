"""expected_grads: right, scaled, wrong, noisy; the gradients are exact whatever they say."""

from collections.abc import Mapping

import pytest
import torch
from lm_head_checks import (
    ALL_TRANSFORMS,
    DIFFERENTIABLE,
    OUTPUTS,
    Case,
    assert_exact,
    backward,
    call,
    error,
    largest,
    make_case,
    run,
    truth,
    upstream_for,
)
from lm_head_tolerances import ALL_DTYPES
from torch import Tensor

from lowpeak import LMHeadOutput, fused_lm_head
from lowpeak.lm_head import ExpectationCounts, expectation_counts
from lowpeak.lm_head.planner import TilePlan, override

CHUNKS = TilePlan(16, 1)
ROWS = 40


def zero_some_rows(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every third row exactly zero, as of a group without an advantage."""
    gone = torch.arange(ROWS) % 3 == 0
    return {name: x.masked_fill(gone.to(x.device), 0.0) for name, x in values.items()}


def scaled(values: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: x * factor for name, x in values.items()}


def counts() -> ExpectationCounts:
    return expectation_counts()["fused_lm_head"]


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",), ("bias",)], ids=str)
@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("names", [("log_probs",), ("entropy",), DIFFERENTIABLE], ids="+".join)
def test_right_expectations(
    names: tuple[str, ...],
    dtype: torch.dtype,
    transform: str,
    frozen: tuple[str, ...],
    device: torch.device,
) -> None:
    """A mapping and a function, in several chunks and with rows of exact zeros."""
    case = make_case(ROWS, 127, 20, dtype, device, transform=ALL_TRANSFORMS[transform])
    upstream = zero_some_rows(upstream_for(case, names))
    expected = scaled(upstream, 1 / 3)

    def function(outputs: LMHeadOutput, index: Tensor) -> dict[str, Tensor]:
        assert outputs.entropy is not None
        assert outputs.entropy.shape == index.shape
        return {name: x[index] for name, x in expected.items()}

    with override(plan_expected=CHUNKS):
        for hint in (expected, function):
            assert_exact(case, OUTPUTS, upstream=upstream, frozen=frozen, expected_grads=hint)
    assert counts() == ExpectationCounts(2, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["wrong", "half", "unnamed", "reversed", "zero"])
def test_wrong_expectations_cost_no_digit(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(ROWS, 127, 20, dtype, device)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    expected = {
        "wrong": scaled(upstream, 1.0) | {"log_probs": torch.ones_like(upstream["log_probs"])},
        "half": {"log_probs": upstream["log_probs"], "entropy": upstream["entropy"] / 2},
        "unnamed": {"log_probs": upstream["log_probs"]},
        "reversed": {name: x.flip(0) for name, x in upstream.items()},
        "zero": scaled(upstream, 0.0),
    }[kind]
    with override(plan_expected=CHUNKS):
        ours = assert_exact(case, OUTPUTS, upstream=upstream, expected_grads=expected)
        assert counts() == ExpectationCounts(0, 0, 0) if kind == "zero" else counts().missed == 1
    plain = run(case, OUTPUTS, upstream)
    for name, gradient in plain.gradients.items():
        if device.type == "cpu":
            assert torch.equal(ours.gradients[name], gradient), name
        else:  # chunks and tiles are summed in another order there
            digits = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                ours.gradients[name],
                gradient,
                rtol=digits,
                atol=digits * float(gradient.abs().max()),
            )


@pytest.mark.parametrize("noise", [0.8e-6, 1.2e-6])
def test_noise(noise: float, device: torch.device) -> None:
    case = make_case(ROWS, 127, 20, torch.float64, device, ignored=0.0)
    upstream = upstream_for(case, ("log_probs",))
    expected = {"log_probs": upstream["log_probs"].clone()}
    expected["log_probs"][5] += noise * largest(upstream["log_probs"])
    exact = truth(case, upstream).gradients
    ours = run(case, ("log_probs",), upstream, expected_grads=expected).gradients
    assert counts().held == (noise < 1e-6)
    bound = largest(case.weight) * 2 * noise * largest(upstream["log_probs"])
    assert error(ours["hidden"], exact["hidden"]) <= (bound if noise < 1e-6 else 1e-12)


@pytest.mark.parametrize("factor", [65536.0, 1 / 12, -1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_common_factor(factor: float, dtype: torch.dtype, device: torch.device) -> None:
    """A gradient scaler, accumulation over steps, a sign, a loss that was switched off."""
    case = make_case(ROWS, 127, 20, dtype, device)
    expected = scaled(upstream_for(case, ("log_probs", "entropy")), 2.0**-12)
    assert_exact(case, OUTPUTS, upstream=scaled(expected, factor), expected_grads=expected)
    assert counts() == ExpectationCounts(1, 0, 0)


@pytest.mark.parametrize("held", [True, False])
def test_backward_twice_and_accumulation(held: bool, device: torch.device) -> None:
    """What was kept is not used up, and gradients add to those that are there."""
    case = make_case(ROWS, 127, 20, device=device)
    upstream = upstream_for(case, ("log_probs",))
    expected = upstream if held else {"log_probs": upstream["log_probs"] + 1}
    leaves = case.leaves()
    result = call(case, leaves, ("log_probs",), expected_grads=expected)
    backward(result, upstream, retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    backward(result, scaled(upstream, 3.0))
    for name, leaf in leaves.items():
        assert error(leaf.grad, 4 * once[name]) <= 1e-6 * largest(leaf.grad), name
    assert counts().held == (2 if held else 0)


def test_gradient_of_one_input_only(device: torch.device) -> None:
    case = make_case(ROWS, 127, 20, device=device)
    upstream = upstream_for(case, ("log_probs",))
    expected = truth(case, upstream).gradients
    for name in ("hidden", "weight", "bias"):
        leaves = case.leaves()
        result = call(case, leaves, ("log_probs",), expected_grads=upstream)
        (ours,) = torch.autograd.grad(result.log_probs, leaves[name], upstream["log_probs"])
        assert error(ours, expected[name]) <= 1e-5 * largest(expected[name]), name


@pytest.mark.parametrize("function", [False, True], ids=["mapping", "function"])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.1])
def test_ignored_rows_and_empty_batches(
    ignored: float, function: bool, device: torch.device
) -> None:
    for rows in ((0,), (3, 5)):
        case = make_case(rows, 60, 12, device=device, ignored=ignored)
        upstream = upstream_for(case, ("log_probs",))
        flat = upstream["log_probs"].reshape(-1)
        hint = (lambda _, index, flat=flat: {"log_probs": flat[index]}) if function else upstream
        assert_exact(case, upstream=upstream, expected_grads=hint)


def test_tied_weight_and_gradient_accumulation(device: torch.device) -> None:
    """The weight is the embedding too, two micro-batches a step, the loss divided by two."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 12, generator=generator).to(device)
    tokens = torch.randint(50, (2, 3, 9), generator=generator).to(device)

    def step(weight: Tensor, hinted: bool) -> Tensor:
        for batch in tokens:
            targets = batch.roll(-1, 1)
            hint = {"log_probs": torch.full(targets.shape, -1 / 27, device=device)}
            log_probs = fused_lm_head(
                torch.nn.functional.embedding(batch, weight).tanh(), weight, targets,
                expected_grads=hint if hinted else None,
            ).log_probs  # fmt: skip
            assert log_probs is not None
            (-log_probs.mean() / 2).backward()
        assert weight.grad is not None
        return weight.grad

    ours, plain = (step(table.clone().requires_grad_(), hinted) for hinted in (True, False))
    assert error(ours, plain) <= 1e-6 * largest(plain)
    assert counts() == ExpectationCounts(2, 0, 0)


def test_autocast(device: torch.device) -> None:
    """float32 parameters, bfloat16 products."""
    case = make_case(ROWS, 127, 20, torch.bfloat16, device)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    gradients = []
    for hint in (upstream, None):
        leaves = case.to(torch.float32).leaves()
        with torch.autocast(device.type, torch.bfloat16):
            result = call(case, leaves, OUTPUTS, expected_grads=hint)
        backward(result, upstream)
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, ours in gradients[0].items():
        assert ours.dtype == torch.float32
        assert error(ours, gradients[1][name]) <= 2**-7 * largest(ours), name
    assert counts() == ExpectationCounts(1, 0, 0)


def test_overflow_shows_and_does_not_count(device: torch.device) -> None:
    """A gradient scaler must find its overflow, and tries again with a smaller scale."""
    case = make_case(ROWS, 30, 8, device=device, ignored=0.0)
    upstream = upstream_for(case, ("log_probs",))
    overflow = {"log_probs": upstream["log_probs"].clone()}
    overflow["log_probs"][3] = float("inf")
    ours = run(case, ("log_probs",), overflow, expected_grads=upstream).gradients
    for name in ("hidden", "weight", "bias"):
        assert not torch.isfinite(ours[name]).all(), name
    assert counts() == ExpectationCounts(0, 0, 0)


def test_a_function_is_asked_without_grad_mode_for_the_rows_that_count(
    device: torch.device,
) -> None:
    case = make_case((4, 10), 60, 12, device=device, ignored=0.4)
    asked: list[Tensor] = []

    def function(outputs: LMHeadOutput, index: Tensor) -> dict[str, Tensor]:
        assert not torch.is_grad_enabled()
        assert outputs.mean_logits is None
        asked.append(index)
        return {"log_probs": -outputs.log_probs.exp()}

    with override(plan_expected=CHUNKS):
        leaves = case.leaves()
        outputs = ("log_probs", "entropy")
        result = call(case, leaves, outputs, expected_grads=function)
        (-result.log_probs.exp().sum()).backward()
    valid = (case.targets.flatten() != -100).nonzero().squeeze(1)
    assert torch.equal(torch.cat(asked), valid)
    assert len(asked) == -(-len(valid) // 16)
    assert counts() == ExpectationCounts(1, 0, 0)


def test_double_backward_is_refused(device: torch.device) -> None:
    case = make_case(5, 20, 6, device=device)
    upstream = upstream_for(case, ("log_probs",))
    leaves = case.leaves()
    result = call(case, leaves, ("log_probs",), expected_grads=upstream)
    gradients = torch.autograd.grad(
        result.log_probs, list(leaves.values()), upstream["log_probs"], create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"(?is)fused_lm_head.*double backward"):
        sum(gradient.square().sum() for gradient in gradients).backward()


BAD = {
    "list": ([1.0], TypeError, "mapping"),
    "empty": ({}, ValueError, "log_probs"),
    "not asked for": ({"entropy": torch.zeros(ROWS)}, ValueError, "entropy"),
    "no gradient": ({"is_top1": torch.zeros(ROWS)}, ValueError, "is_top1"),
    "number": ({"log_probs": 1.0}, TypeError, "log_probs"),
    "integers": ({"log_probs": torch.zeros(ROWS, dtype=torch.int64)}, TypeError, "int64"),
    "shape": ({"log_probs": torch.zeros(ROWS, 1)}, ValueError, r"\(40, 1\)"),
    "answer": (lambda outputs, index: None, TypeError, "returned None"),
    "chunk": (lambda outputs, index: {"log_probs": torch.zeros(3)}, ValueError, r"\(3,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_remedy(name: str) -> None:
    hint, kind, words = BAD[name]
    case = make_case(ROWS, 60, 12, ignored=0.0)
    with pytest.raises(kind, match=f"(?s)expected_grads.*{words}"):
        call(case, case.leaves(), ("log_probs", "is_top1"), expected_grads=hint)


def test_all_rows_cannot_read_on_the_host() -> None:
    case: Case = make_case(ROWS, 60, 12)
    hint = upstream_for(case, ("log_probs",))
    with pytest.raises(ValueError, match="row_selection='valid'"):
        call(case, case.leaves(), ("log_probs",), expected_grads=hint, row_selection="all")
