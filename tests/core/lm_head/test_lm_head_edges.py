"""Rows on which a careless softmax breaks: certain, impossible, masked, offset, overflowing."""

import math
from dataclasses import replace

import pytest
import torch
from lm_head_checks import (
    DIFFERENTIABLE,
    OUTPUTS,
    Case,
    Transform,
    assert_exact,
    call,
    error,
    largest,
    make_case,
    run,
    truth,
    upstream_for,
)
from lm_head_tolerances import statistics_dtype
from torch import Tensor

MINUS_INFINITY = float("-inf")


def exact_logits_case(
    logits: Tensor, targets: Tensor, dtype: torch.dtype, device: torch.device
) -> Case:
    """A case of one row or more with these very logits: hidden is the identity."""
    rows = logits.shape[0]
    hidden = torch.eye(rows, device=device, dtype=dtype)
    return Case(hidden, logits.T.to(device, dtype).contiguous(), targets.to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gap", [10.0, 16.0, 20.75, 30.0, 60.0])
def test_certain_target_keeps_its_tiny_log_prob(
    gap: float, dtype: torch.dtype, device: torch.device
) -> None:
    """p -> 1: log p = -log1p((V-1) exp(-gap)) must not round to 0, in values and gradients.

    At gap 20.75 and V = 2 this is -9.8e-10, which 1 - exp(log p) in float32 loses.
    """
    for vocabulary, target in ((2, 0), (2, 1), (130, 77)):
        logits = torch.zeros(1, vocabulary)
        logits[0, target] = gap
        case = exact_logits_case(logits, torch.tensor([target]), dtype, device)
        case = replace(case, bias=torch.zeros(vocabulary, device=device, dtype=dtype))
        ours = run(case, OUTPUTS, {"log_probs": torch.ones(1, device=device)})
        # Closed forms: the float64 oracle itself loses digits here.
        odds = (vocabulary - 1) * math.exp(-gap)
        expected = {
            "log_probs": -math.log1p(odds),
            "entropy": math.log1p(odds) + gap * odds / (1 + odds),
            "log_sum_sq_probs": math.log1p((vocabulary - 1) * math.exp(-2 * gap))
            - 2 * math.log1p(odds),
            "log_normalizer": gap + math.log1p(odds),
        }
        for name, value in expected.items():
            found = float(ours.outputs[name])
            assert math.isclose(found, value, rel_tol=1e-4), (name, vocabulary, target)
        slopes = torch.full((vocabulary,), -math.exp(-gap) / (1 + odds), dtype=torch.float64)
        slopes[target] = odds / (1 + odds)
        gradient = ours.gradients["bias"]
        assert gradient is not None
        relative = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        floor = 1e-30 if dtype != torch.float16 else 6e-8  # one float16 subnormal
        difference = (gradient.double().cpu() - slopes).abs()
        assert (difference <= relative * slopes.abs() + floor).all(), (vocabulary, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_log_probs_are_never_positive_nor_entropy_negative(
    dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case(300, 127, 20, dtype, device, logit_std=200.0, ignored=0.0)
    top = truth(case).outputs  # targets at the top of each row, where p is about 1
    logits = case.hidden.double() @ case.weight.double().T + case.bias.double()
    best = Case(case.hidden, case.weight, logits.argmax(-1), case.bias)
    ours = assert_exact(best)
    assert (ours.outputs["log_probs"] <= 0).all()
    assert (ours.outputs["entropy"] >= 0).all()
    assert (ours.outputs["log_sum_sq_probs"] <= 0).all()
    assert top["log_probs"].shape == ours.outputs["log_probs"].shape


@pytest.mark.parametrize("target", [0, 64, 128])
@pytest.mark.parametrize("below", [80.0, 88.0, 104.0, 1000.0, 30000.0])
def test_target_far_below_the_rest(below: float, target: int, device: torch.device) -> None:
    """A target more than 88 nats under the log normalizer: exp(-88) leaves float32."""
    logits = torch.zeros(1, 129)
    logits[0, target] = -below
    case = exact_logits_case(logits, torch.tensor([target]), torch.float32, device)
    assert_exact(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [-1000.0, -100.0, 1000.0, 30000.0])
def test_common_offset_cancels(offset: float, dtype: torch.dtype, device: torch.device) -> None:
    """logits + offset: only mean_logits and log_normalizer move. All logits under -100 included."""
    spread = torch.tensor([[0.0, 16.0, -32.0, 48.0, 16.0] + [0.0] * 130]) if offset > 1e4 else (
        torch.tensor([[0.0, 2.0, -4.0, 8.0, 1.0] + [0.0] * 130])
    )  # fmt: skip
    # Multiples of 16 (float16 at 3e4), of 8 (bfloat16 at 1000): exact in the logits' dtype.
    if dtype == torch.bfloat16:
        spread = spread * 8 if offset < 1e4 else spread * 16
    targets = torch.tensor([4])
    base = exact_logits_case(spread, targets, dtype, device)
    if dtype == torch.bfloat16 and offset == 30000.0:
        offset = 29952.0
    moved = exact_logits_case(spread + offset, targets, dtype, device)
    assert (moved.weight.float() == (spread + offset).T.to(device)).all()
    plain, shifted = run(base).outputs, run(moved).outputs
    for name in ("log_probs", "entropy", "log_sum_sq_probs"):
        assert error(shifted[name], plain[name]) <= 1e-5 * max(1, largest(plain[name])), name
    for name in ("mean_logits", "log_normalizer"):
        assert error(shifted[name], plain[name].double() + offset) <= 4e-7 * abs(offset), name
    assert_exact(moved)


def masked_case(
    columns: slice, dtype: torch.dtype, device: torch.device, vocabulary: int = 128
) -> Case:
    """bias -inf on some columns, and no target among them."""
    case = make_case(40, vocabulary, 20, dtype, device)
    bias = case.bias.clone()
    bias[columns] = MINUS_INFINITY
    allowed = torch.isfinite(bias).nonzero().squeeze(1)
    targets = case.targets.where(case.targets < 0, allowed[case.targets % allowed.numel()])
    return Case(case.hidden, case.weight, targets, bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [
    slice(100, 128), slice(0, 1), slice(0, 64), slice(32, 96), slice(1, 128), slice(0, 127),
], ids=str)  # fmt: skip
def test_a7_entropy_with_masked_columns(
    columns: slice, dtype: torch.dtype, device: torch.device
) -> None:
    case = masked_case(columns, dtype, device)
    names = [name for name in OUTPUTS if name != "mean_logits"]
    ours = assert_exact(case, names)
    weight, bias = ours.gradients["weight"], ours.gradients["bias"]
    assert (weight[columns] == 0).all()
    assert (bias[columns] == 0).all()
    if dtype != torch.bfloat16:
        kept = torch.isfinite(case.bias)
        logits = (case.hidden @ case.weight.T + case.bias)[:, kept]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        entropy = entropy.masked_fill(case.targets == -100, 0)
        assert error(ours.outputs["entropy"], entropy) <= 1e-5


@pytest.mark.parametrize("transform", [
    Transform(softcap=4.0, temperature=0.7), Transform(scale=-0.5), Transform(scale=0.0),
], ids=str)  # fmt: skip
def test_a7_masked_columns_stay_masked_by_any_transform(
    transform: Transform, device: torch.device
) -> None:
    """softcap * tanh(-inf) would be -softcap, a negative scale +inf, a zero scale NaN."""
    case = masked_case(slice(20, 90), torch.float32, device)
    case = Case(case.hidden, case.weight, case.targets, case.bias, transform)
    assert_exact(case, [name for name in OUTPUTS if name != "mean_logits"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a7_mean_logits_with_masked_columns(dtype: torch.dtype, device: torch.device) -> None:
    """mean_logits is -inf in value; the other columns get 1/V each, the masked ones nothing."""
    case = masked_case(slice(20, 90), dtype, device)
    ours = assert_exact(case)
    mean = ours.outputs["mean_logits"]
    assert torch.isneginf(mean[case.targets != -100]).all()
    assert (mean[case.targets == -100] == 0).all()


@pytest.mark.parametrize("where", ["first", "middle", "last", "all_but_last_column"])
@pytest.mark.parametrize("scratch", [None, 1 << 20])
def test_a7_whole_tiles_masked(where: str, scratch: int | None, device: torch.device) -> None:
    """A stretch of 12000 masked columns holds whole tiles, the first one too."""
    columns = {
        "first": slice(0, 12000),
        "middle": slice(4000, 16000),
        "last": slice(8003, 20003),
        "all_but_last_column": slice(0, 20002),
    }[where]
    case = masked_case(columns, torch.float32, device, vocabulary=20003)
    assert_exact(case, [n for n in OUTPUTS if n != "mean_logits"], scratch_bytes=scratch)


def test_a7_target_in_a_masked_column(device: torch.device) -> None:
    """log p of a masked target is -inf, its other statistics are finite."""
    case = masked_case(slice(100, 128), torch.float32, device)
    targets = torch.full_like(case.targets, 110)
    case = Case(case.hidden, case.weight, targets, case.bias)
    outputs = ("log_probs", "entropy", "log_normalizer", "is_top1")
    upstream = upstream_for(case, ("entropy", "log_normalizer"))
    ours = assert_exact(case, outputs, upstream=upstream)
    assert torch.isneginf(ours.outputs["log_probs"]).all()
    assert not ours.outputs["is_top1"].any()


@pytest.mark.parametrize("vocabulary", [1, 5, 20003])
def test_a7_row_without_a_finite_logit_raises(vocabulary: int, device: torch.device) -> None:
    case = make_case(4, vocabulary, 6, device=device)
    masked = torch.full_like(case.bias, MINUS_INFINITY)
    with pytest.raises(ValueError, match=r"(?s)finite.*bias|bias.*finite"):
        run(Case(case.hidden, case.weight, case.targets, masked))


def test_a7_row_without_a_finite_logit_raises_in_all_mode(device: torch.device) -> None:
    """An assertion on the device, which is an exception on the CPU (and ends a CUDA context)."""
    if device.type != "cpu":
        pytest.skip("a failed assertion on the device ends the process's CUDA context")
    case = make_case(4, 5, 6, ignored=0.0)
    masked = torch.full_like(case.bias, MINUS_INFINITY)
    with pytest.raises(RuntimeError, match="bias"):
        run(replace(case, bias=masked), row_selection="all")


def test_target_out_of_range_raises_in_all_mode(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a failed assertion on the device ends the process's CUDA context")
    case = make_case(4, 5, 6, ignored=0.0)
    case.targets[2] = 5
    with pytest.raises(RuntimeError, match="target"):
        run(case, row_selection="all")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_non_finite_upstream_shows_in_every_gradient(
    dtype: torch.dtype, value: float, device: torch.device
) -> None:
    """A GradScaler finds its overflow in the gradients: none may be cleaned away."""
    case = make_case(20, 30, 8, dtype, device, ignored=0.0)
    upstream = {"log_probs": torch.ones(20, device=device)}
    upstream["log_probs"][3] = value
    ours = run(case, ("log_probs",), upstream)
    for name in ("hidden", "weight", "bias"):
        assert not torch.isfinite(ours.gradients[name]).all(), name


def test_fp16_rows_of_very_different_upstream(device: torch.device) -> None:
    """One token with gradient 1 beside tokens with 2^-20: those keep their digits."""
    case = make_case(20, 30, 8, torch.float16, device, ignored=0.0)
    upstream = {"log_probs": torch.full((20,), 2.0**-20, device=device)}
    upstream["log_probs"][0] = 1.0
    ours, true = run(case, ("log_probs",), upstream), truth(case, upstream)
    small, expected = ours.gradients["hidden"][1:], true.gradients["hidden"][1:]
    # Half a unit of float16's subnormals, and its relative rounding.
    assert error(small, expected) <= 2.0**-25 + 2e-3 * largest(expected)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a12_fp16_logits_beyond_65504(softcap: float | None, device: torch.device) -> None:
    """Expected: the value of the float32 upcast of the same float16 weights, not inf or NaN."""
    case = make_case(20, 128, 32, torch.float16, device, ignored=0.0, logit_std=30000.0, bias=False)
    case = Case(case.hidden, case.weight, case.targets, None, Transform(softcap=softcap))
    logits = case.hidden.float() @ case.weight.float().T
    assert largest(logits) > 65504
    upstream = {"log_probs": torch.full((20,), 2.0**-8, device=device)}
    ours = run(case, OUTPUTS, upstream)
    # float32 products of the same float16 numbers: exact up to float32's own roundoff.
    assert_close_to_upcast(case, ours.outputs, largest(logits))
    # Gradients of the weight are small enough for float16; those of hidden are not (30000 * 2^-8).
    gradient, expected = ours.gradients["weight"], truth(case, upstream).gradients["weight"]
    assert error(gradient, expected) <= 2e-3 * largest(expected)


def assert_close_to_upcast(case: Case, outputs: dict[str, Tensor], largest_logit: float) -> None:
    expected = truth(case).outputs
    for name in DIFFERENTIABLE:
        assert error(outputs[name], expected[name]) <= 1e-5 * largest_logit, name


@pytest.mark.parametrize("exponent", [-14, -20, -24, 4])
@pytest.mark.parametrize("name", ["log_probs", "entropy", "log_normalizer"])
def test_fp16_gradients_do_not_underflow(name: str, exponent: int, device: torch.device) -> None:
    """Upstream gradients of 2^-20 (a mean over 1e6 tokens): dlogits must not be flushed to zero.

    Gradients that float16 itself can hold must come out; weights are large so that it can.
    """
    base = make_case(64, 127, 20, torch.float16, device, logit_std=6.0)
    case = Case(base.hidden * 16, base.weight / 16, base.targets, base.bias)
    upstream = {name: torch.full((64,), 2.0**exponent, device=device)}
    ours, true = run(case, (name,), upstream), truth(case, upstream)
    for parameter in ("weight", "bias"):
        gradient, expected = ours.gradients[parameter], true.gradients[parameter]
        # 2^-25: half a subnormal of float16, the rounding of the result itself.
        allowed = 4e-3 * largest(expected) + 2.0**-25
        assert error(gradient, expected) <= allowed, parameter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["log_probs", "entropy", "log_sum_sq_probs"])
def test_rows_of_dlogits_sum_to_zero(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A common shift of the logits changes nothing, so the gradient of the bias sums to zero."""
    case = make_case(64, 300, 20, dtype, device, ignored=0.0)
    upstream = upstream_for(case, (name,))
    gradient = run(case, (name,), upstream).gradients["bias"]
    assert gradient is not None
    magnitude = float(gradient.double().abs().sum())
    # Each of 300 sums over rows is rounded once to the dtype of the bias; each row's probabilities
    # add up to 1 but for some units in the last place of the statistics.
    statistics = torch.finfo(statistics_dtype(dtype)).eps
    allowed = magnitude * (torch.finfo(dtype).eps + 16 * statistics) + 64 * 16 * statistics
    assert abs(float(gradient.double().sum())) <= allowed


def test_one_column_is_certain(device: torch.device) -> None:
    """V = 1: p is 1, everything about it is exactly 0 and so are its gradients."""
    case = make_case(9, 1, 6, device=device, ignored=0.0)
    names = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
    ours = run(case, names, upstream_for(case, names))
    for name in names[:3]:
        assert (ours.outputs[name] == 0).all(), name
    assert ours.outputs["is_top1"].all()
    for name in ("hidden", "weight", "bias"):
        gradient = ours.gradients[name]
        assert gradient is not None
        assert (gradient == 0).all(), name


def test_non_finite_hidden_shows(device: torch.device) -> None:
    """A NaN in one row stays in this row and is not hidden by masks."""
    case = make_case(6, 40, 8, device=device, ignored=0.0)
    case.hidden[2, 3] = float("nan")
    result = call(case, case.leaves(), ("log_probs",), row_selection="all")
    assert torch.isnan(result.log_probs[2])
    assert torch.isfinite(result.log_probs[[0, 1, 3, 4, 5]]).all()
