"""The single pass that keeps exponentials: Hopper's kernels there, their torch twins elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from lm_head_checks import Case, Transform, assert_exact, call, make_case, run, truth, upstream_for
from test_low_rank import adapters
from test_low_rank import assert_exact as assert_low_rank_exact
from torch import Tensor

from lowpeak import LMHeadOutput
from lowpeak.kernels.lm_head_exponential_rows import guess_units_torch, scale_exponentials_torch
from lowpeak.kernels.lm_head_exponentials import (
    Exponentials,
    finish_exponentials_torch,
    keep_exponentials_torch,
)
from lowpeak.kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch
from lowpeak.kernels.lm_head_fold_product import SPAN_COLUMNS
from lowpeak.kernels.lm_head_gradient import gradient_tile_torch
from lowpeak.kernels.lm_head_scaled_rows import scaled_rows_torch
from lowpeak.kernels.lm_head_weight_gradient import accumulate_halves_torch
from lowpeak.kernels.logit_transform import TileTransform, transform_tile_torch
from lowpeak.lm_head import chunk_gradients, chunk_walk, chunks, exponentials, forward, tiles
from lowpeak.lm_head.planner import TilePlan, override

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

CHUNKS = TilePlan(12, 1 << 20)
BF16 = torch.bfloat16


def fold_product_torch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    statistics: RowStatistics,
    start: int,
    transform: TileTransform,
    folded: Folded,
    logits: Tensor | None = None,
    exponentials: Exponentials | None = None,
) -> None:
    raw = hidden.float() @ weight.float().t()
    if exponentials is not None:
        assert start == 0
        z = transform_tile_torch(raw.clone(), bias, temperature, transform, torch.float32)
        keep_exponentials_torch(z, targets, SPAN_COLUMNS, exponentials)
    fold_tile_torch(raw, bias, targets, temperature, statistics, start, transform, folded)


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[list[bool]]:
    """Twins in place of kernels on a CPU, where bfloat16 products have no interpreter.

    The list tells of each chunk whether it was turned into gradients of logits.
    """
    if device.type == "cpu":
        serve = "products_serve"
        monkeypatch.setattr(tiles, serve, lambda *x: all(one.dtype == BF16 for one in x))
        for module in (forward, chunk_walk):
            monkeypatch.setattr(module, "fold_product_triton", fold_product_torch)
        monkeypatch.setattr(exponentials, "finish_exponentials_triton", finish_exponentials_torch)
        monkeypatch.setattr(exponentials, "gradient_tile_triton", gradient_tile_torch)
        monkeypatch.setattr(exponentials, "guess_units_triton", guess_units_torch)
        monkeypatch.setattr(exponentials, "scale_exponentials_triton", scale_exponentials_torch)
        monkeypatch.setattr(chunk_gradients, "scaled_rows_triton", scaled_rows_torch)
        monkeypatch.setattr(chunk_gradients, "accumulate_halves_triton", accumulate_halves_torch)
    turned: list[bool] = []
    finish = exponentials.finish_exponentials_triton

    def watched(kept: Exponentials, targets: Tensor, logits: Tensor, own: bool) -> Tensor:
        turned.append(own)
        return finish(kept, targets, logits, own)

    monkeypatch.setattr(exponentials, "finish_exponentials_triton", watched)
    with override(plan_frozen=CHUNKS, plan_expected=CHUNKS):
        yield turned
    assert turned, "no exponentials were kept"


def case_of(device: torch.device, **options: Any) -> Case:
    options = {"bias": False} | options
    return make_case(40, SPAN_COLUMNS + 300, 24, BF16, device, **options)


@pytest.mark.parametrize("spread", [3.0, 60.0], ids=["near", "far"])
@pytest.mark.parametrize("weight", ["frozen", "expected"])
def test_log_probs(weight: str, spread: float, device: torch.device, passes: list[bool]) -> None:
    """Also where the target lies 90 and more below the likeliest token."""
    case = case_of(device, logit_std=spread)
    upstream = upstream_for(case, ("log_probs",))
    options: dict[str, Any] = {"frozen": ("weight",)}
    if weight == "expected":
        options = {"expected_grads": upstream}
    ours = assert_exact(case, ("log_probs",), upstream=upstream, backend="triton", **options)
    assert passes == [False] * 3  # some 30 of 40 rows count
    exact = truth(case, upstream).outputs["log_probs"]
    if spread > 3:
        assert exact.min() < -90
    # what bfloat16 logits are off by: 2^-8 of 10, and of 200
    assert (ours.outputs["log_probs"].double() - exact).abs().max() < 2e-5 * spread


def test_the_mean_of_few_improbable_tokens_is_rounded_once(device: torch.device) -> None:
    """A target's row of a gradient is no product of rounded numbers."""
    case = make_case(32, SPAN_COLUMNS, 24, BF16, device, bias=False, ignored=0.0, logit_std=0.2)
    upstream = {"log_probs": torch.full((32,), 1 / 32, device=device)}
    ours = run(case, ("log_probs",), upstream, backend="triton", expected_grads=upstream)
    exact = truth(case, upstream)
    for name in ("hidden", "weight"):
        found, right = ours.gradients[name], exact.gradients[name]
        assert found is not None
        assert right is not None
        # a rounding is off by 1.7e-3 on average
        assert (found.double() - right).norm() / right.norm() < 2e-3


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("bias",), ()], ids=str)
def test_a_bias(frozen: tuple[str, ...], device: torch.device, passes: list[bool]) -> None:
    """One that masks tokens, a target among them; and its own gradient."""
    case = case_of(device, bias=True, ignored=0.0)
    assert case.bias is not None
    case.bias[7:50] = -float("inf")
    case.targets[0] = 9
    case.targets[1:] = case.targets[1:].clamp(min=50)
    upstream = upstream_for(case, ("log_probs",))
    upstream["log_probs"][0] = 0
    expected = {} if len(frozen) == 2 else {"expected_grads": upstream}
    leaves = case.leaves(frozen)
    result = call(case, leaves, ("log_probs",), backend="triton", **expected)
    result.log_probs[1:].backward(upstream["log_probs"][1:])
    exact = truth(case, upstream)
    assert result.log_probs[0] == -float("inf")
    for name, leaf in leaves.items():
        if name in frozen:
            continue
        found, right = leaf.grad, exact.gradients[name]
        assert found is not None
        assert right is not None
        assert (found.double() - right).norm() / right.norm() < 5e-3, name
    assert passes == [not frozen] * 4


def test_temperature_of_each_row(device: torch.device) -> None:
    temperature = (torch.rand(40, generator=torch.Generator().manual_seed(3)) + 0.5).to(device)
    case = case_of(device, transform=Transform(scale=0.8, temperature=temperature))
    upstream = upstream_for(case, ("log_probs",))
    options = {"upstream": upstream, "backend": "triton"}
    assert_exact(case, ("log_probs",), expected_grads=upstream, **options)
    assert_exact(case, ("log_probs",), frozen=("weight",), **options)


NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "log_normalizer")


@pytest.mark.parametrize("names", [NAMES, ("log_probs", "log_normalizer")], ids="+".join)
def test_other_outputs(names: tuple[str, ...], device: torch.device, passes: list[bool]) -> None:
    case = case_of(device, bias=True)
    upstream = upstream_for(case, names)
    options: dict[str, Any] = {"upstream": upstream, "backend": "triton"}
    assert_exact(case, names, expected_grads=upstream, **options)
    if len(names) == 2:  # kept for both
        assert_exact(case, names, frozen=("weight", "bias"), **options)
    assert all(passes)


def test_a_function_is_asked(device: torch.device, passes: list[bool]) -> None:
    """Of log_probs alone nothing is turned, whatever it says of them."""
    case = case_of(device)

    def loss(log_probs: Tensor) -> Tensor:
        return (log_probs.exp() * (case.targets != -100)).sum()

    def expect(output: LMHeadOutput, rows: Tensor) -> Mapping[str, Tensor]:
        assert output.log_probs is not None
        return {"log_probs": output.log_probs.exp()}

    leaves = case.leaves()
    names = ("log_probs", "entropy")
    result = call(case, leaves, names, backend="triton", expected_grads=expect)
    loss(result.log_probs).backward()
    exact = truth(case, {"log_probs": result.log_probs.detach().exp().double()})
    for name, leaf in leaves.items():
        right = exact.gradients[name]
        assert right is not None
        assert leaf.grad is not None
        assert (leaf.grad.double() - right).norm() / right.norm() < 5e-3, name
    assert passes == [False] * 3


@pytest.mark.parametrize("frozen", [("weight", "bias"), ()], ids=["frozen", "trained"])
def test_adapters(
    frozen: tuple[str, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":  # what multiplies them in float32 as it is, the twin
        monkeypatch.setattr(chunks, "half_products_serve", lambda inputs: False)
    case = make_case(33, 130, 24, BF16, device)
    assert_low_rank_exact(
        case, adapters(case, (3, 2)), frozen=frozen, expected=True, backend="triton"
    )


def test_a_float32_weight_under_autocast(device: torch.device, passes: list[bool]) -> None:
    """Its gradient is summed in float32, without halves."""
    case = case_of(device).to(torch.float32)
    upstream = upstream_for(case, ("log_probs",))
    with torch.autocast(device.type, BF16):
        assert_exact(
            case,
            ("log_probs",),
            upstream=upstream,
            compute_dtype=BF16,
            backend="triton",
            expected_grads=upstream,
        )
    assert passes == [False] * 3
