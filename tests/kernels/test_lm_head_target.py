"""The kernel of target coefficients against its plain-torch twin, and the single pass on Triton."""

from dataclasses import fields

import pytest
import torch
from lm_head_checks import ALL_TRANSFORMS, OUTPUTS, assert_exact, make_case, upstream_for
from torch import Tensor

from lowpeak import LMHeadOutput
from lowpeak.kernels.lm_head_fold import Folded, RowStatistics
from lowpeak.kernels.lm_head_gradient import RowCoefficients
from lowpeak.kernels.lm_head_target import target_coefficients_torch, target_coefficients_triton
from lowpeak.lm_head import expectation_counts
from lowpeak.lm_head.planner import TilePlan, override

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")


def statistics(rows: int, device: torch.device) -> RowStatistics:
    """Of ordinary rows, and of such where the target or all others have no probability."""
    sums = RowStatistics.empty(rows, Folded(), torch.float32, device)
    generator = torch.Generator().manual_seed(0)
    sums.maximum.copy_(torch.randn(rows, generator=generator) * 20)
    sums.target.copy_(torch.randn(rows, generator=generator) * 20)
    sums.sum_exp.copy_(1 + torch.rand(rows, generator=generator) * 1000)
    sums.target[0] = -float("inf")
    sums.maximum[1], sums.sum_exp[1] = -float("inf"), 0.0
    sums.target[2] = sums.maximum[2] + 200
    sums.maximum[3] = float("nan")
    return sums


def blank(target: Tensor) -> RowCoefficients:
    filled = ("centre", "inverse_sum", "target_rest")
    values = {name: torch.empty_like(target) for name in filled}
    zeros = torch.zeros_like(target)
    return RowCoefficients(
        **values, log_sum=zeros, linear=zeros, target=target, log_linear=None, square=None,
        constant=None,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [4, 255, 257])
def test_kernel_and_twin(rows: int, device: torch.device) -> None:
    sums = statistics(rows, device)
    target = torch.randn(rows, generator=torch.Generator().manual_seed(1)).to(device)
    ours, twin = blank(target), blank(target)
    target_coefficients_triton(sums, ours)
    target_coefficients_torch(sums, twin)
    for field in fields(ours):
        found, expected = getattr(ours, field.name), getattr(twin, field.name)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-37, equal_nan=True)


def test_twin_against_float64(device: torch.device) -> None:
    sums = statistics(300, device)
    target = torch.ones(300, device=device)
    ours = blank(target)
    target_coefficients_torch(sums, ours)
    others = sums.maximum.double() + sums.sum_exp.double().log()
    odds = torch.exp(sums.target.double() - others)
    expected = 1 / (1 + odds)
    torch.testing.assert_close(
        ours.target_rest.double(), expected, rtol=1e-5, atol=1e-37, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "entropy")], ids="+".join)
def test_single_pass(names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Frozen and expected, in chunks of 16 rows, with some rows of exact zeros."""
    case = make_case(33, 130, 20, dtype, device, transform=ALL_TRANSFORMS["all"])
    upstream = upstream_for(case, names)
    for value in upstream.values():
        value[::4] = 0
    chunks = TilePlan(16, 1)
    with override(plan_frozen=chunks, plan_expected=chunks):
        frozen = {"frozen": ("weight", "bias"), "backend": "triton"}
        assert_exact(case, OUTPUTS, upstream=upstream, **frozen)
        for options in (frozen, {"backend": "triton"}):
            assert_exact(case, OUTPUTS, upstream=upstream, expected_grads=upstream, **options)


def test_an_answer_without_strides(device: torch.device) -> None:
    """A function that expects the same of every row may say so by one number."""
    case = make_case(20, 130, 20, torch.float32, device, ignored=0.0)
    upstream = {"log_probs": torch.full((20,), 0.3, device=device)}

    def expect(output: LMHeadOutput, rows: Tensor) -> dict[str, Tensor]:
        return {"log_probs": torch.tensor(0.3, device=device).expand(rows.numel())}

    with override(plan_expected=TilePlan(16, 1)):
        assert_exact(
            case, ("log_probs",), upstream=upstream, backend="triton", expected_grads=expect
        )
    assert expectation_counts()["fused_lm_head"].held == 1
