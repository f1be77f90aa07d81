"""Kernels of a row's numbers against their twins, and these against float64."""

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.lm_head_exponential_rows import (
    MARGIN,
    guess_units_torch,
    guess_units_triton,
    scale_exponentials_torch,
    scale_exponentials_triton,
)
from lowpeak.kernels.lm_head_fold import Folded, RowStatistics
from lowpeak.kernels.lm_head_merge import merge_spans_torch, merge_spans_triton
from lowpeak.kernels.lm_head_scaled_rows import scaled_rows_torch, scaled_rows_triton
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

INFINITY = float("inf")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("optional", [False, True])
def test_units(optional: bool, device: torch.device) -> None:
    """The target's logit and a margin; the margin alone of a masked target and of a hidden NaN."""
    hidden, weight = normal(5, 1100).to(device, torch.bfloat16), normal(40, 1100, seed=1).to(device)
    weight = weight.to(torch.bfloat16)
    targets = torch.tensor([0, 39, 7, 7, 20], device=device)
    bias = temperature = None
    if optional:
        bias, temperature = normal(40, seed=2).to(device), (normal(5).abs() + 0.5).to(device)
        bias[20] = -INFINITY
    hidden[1, 3] = float("nan")
    transform = TileTransform(scale=0.8, temperature=1.3)
    rest = (hidden, weight, bias, targets, temperature, transform)
    found, twin = guess_units_triton(*rest), guess_units_torch(*rest)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-4)
    exact = hidden[2].double() @ weight[7].double() + (0.0 if bias is None else bias[7].double())
    exact = exact * 0.8 / (1.3 if temperature is None else temperature[2].double())
    assert float(found[2]) == pytest.approx(float(exact) + MARGIN, rel=1e-5)
    assert found[1] == MARGIN
    if optional:
        assert found[4] == MARGIN


@pytest.mark.parametrize("per_row", [False, True])
def test_scales(per_row: bool, device: torch.device) -> None:
    rows = 300
    others, unit = (normal(rows).abs() + 0.1).to(device), normal(rows, seed=1).to(device)
    logits, upstream = (normal(rows, seed=2) * 9).to(device), normal(rows, seed=3).to(device)
    logits[3], others[4] = -INFINITY, 0.0
    temperature = (normal(rows, seed=4).abs() + 0.5).to(device) if per_row else None
    transform = TileTransform(scale=0.8, temperature=1.3)
    rest = (others, unit, logits, upstream, temperature, transform)
    found, twin = scale_exponentials_triton(*rest), scale_exponentials_torch(*rest)
    for ours, wanted in zip(found, twin, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=1e-7)
    slope = upstream.double() * 0.8 / (1.3 if temperature is None else temperature.double())
    odds = others.double() / torch.exp(logits.double() - unit.double())
    exact = torch.where(logits == -INFINITY, 0.0, slope * odds / (1 + odds))
    torch.testing.assert_close(twin[1].double(), exact, rtol=1e-5, atol=1e-9)
    assert found[1][4] == 0  # no other token has a probability


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_scaled_rows(out: torch.dtype, device: torch.device) -> None:
    product, weight = normal(7, 1030).to(device), normal(20, 1030, seed=1).to(device)
    weight = weight.to(torch.bfloat16)
    targets = torch.tensor([0, 19, 3, 3, 5, 6, 7], device=device)
    scale, rest = normal(7, seed=2).to(device), normal(7, seed=3).to(device)
    found, twin = (torch.full((7, 1030), 7.0, device=device, dtype=out) for _ in range(2))
    scaled_rows_triton(product, weight, targets, scale, rest, found)
    scaled_rows_torch(product, weight, targets, scale, rest, twin)
    # the interpreter cuts bfloat16 off where torch rounds it
    tolerance = (
        {"rtol": 2**-7, "atol": 1e-6} if out == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(found, twin, **tolerance)
    exact = product.double() * scale.double().unsqueeze(1)
    exact += weight[targets].double() * rest.double().unsqueeze(1)
    bound = exact.abs() * torch.finfo(out).eps + 1e-5
    assert ((twin.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("rows", "spans"), [(1, 1), (17, 3), (33, 130)])
def test_merge(everything: bool, rows: int, spans: int, device: torch.device) -> None:
    """Into empty statistics and into such of earlier spans, with spans without a finite logit."""
    folded = Folded(*(everything for _ in range(4)))

    def parts(seed: int) -> dict[str, Tensor]:
        wanted = {"maximum": True, "sum_exp": True, "centred": everything, "squares": everything}
        wanted |= {"total": everything, "maximum_before": everything}
        made = {
            name: (normal(spans, rows, seed=seed + place) * 3).to(device)
            for place, (name, want) in enumerate(wanted.items())
            if want
        }
        made["sum_exp"] = made["sum_exp"].abs() + 0.1
        masked = normal(spans, rows, seed=seed + 9).to(device) > 1
        made["maximum"][masked], made["sum_exp"][masked] = -INFINITY, 0.0
        for name in ("centred", "squares"):
            if everything:
                made[name][masked] = 0.0
        return made

    ours, twin = (RowStatistics.empty(rows, folded, torch.float32, device) for _ in range(2))
    for seed in (0, 20):
        merge_spans_triton(parts(seed), ours)
        merge_spans_torch(parts(seed), twin)
        for name, value in vars(ours).items():
            torch.testing.assert_close(value, getattr(twin, name), rtol=2e-5, atol=2e-5)
    together = {name: torch.cat([x, parts(20)[name]]) for name, x in parts(0).items()}
    top = together["maximum"].amax(0)
    if bool(torch.isfinite(top).all()):
        exact = (together["sum_exp"].double() * (together["maximum"] - top).double().exp()).sum(0)
        torch.testing.assert_close(twin.sum_exp.double(), exact, rtol=1e-5, atol=0)
