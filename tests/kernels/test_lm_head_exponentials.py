"""Exponentials that the fold keeps: against its twin, and rows whose units lie far from theirs.

Triton's interpreter multiplies the bits of bfloat16 as integers: the factors are float16 there.
"""

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.hopper_products import BLOCK_V, LOG2E
from lowpeak.kernels.lm_head_exponentials import (
    Exponentials,
    finish_exponentials_torch,
    finish_exponentials_triton,
    keep_exponentials_torch,
)
from lowpeak.kernels.lm_head_fold import Folded, RowStatistics
from lowpeak.kernels.lm_head_fold_product import SPAN_COLUMNS, fold_product_triton
from lowpeak.kernels.lm_head_gradient import (
    RowCoefficients,
    gradient_tile_torch,
    gradient_tile_triton,
)
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

ROWS, VOCABULARY, WIDTH = 33, SPAN_COLUMNS + 300, 16
TRANSFORM = TileTransform(scale=0.8, temperature=1.25)


def room(unit: Tensor, vocabulary: int = VOCABULARY) -> Exponentials:
    """Room whose tile has a pitch of its own, all of it 7."""
    rows, device = unit.numel(), unit.device
    tile = torch.full((rows, -(-vocabulary // 8) * 8 + 8), 7.0, device=device).bfloat16()
    blocks, spans = -(-vocabulary // BLOCK_V), -(-vocabulary // SPAN_COLUMNS)
    sums = (torch.full((n, rows), 7.0, device=device) for n in (blocks, spans))
    return Exponentials(tile[:, :vocabulary], unit, *sums)


class Case:
    """Factors, and logits far from the row's unit: in all blocks, in one, above and below."""

    def __init__(self, device: torch.device, spread: float) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        hidden = torch.randn(ROWS, WIDTH, generator=generator)
        weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
        weight[300:400, 0] = spread  # one block
        weight[SPAN_COLUMNS:, 1] = -spread  # a span
        self.hidden, self.weight = (x.to(device, dtype) for x in (hidden, weight))
        self.targets = torch.randint(VOCABULARY, (ROWS,), generator=generator).to(device)
        self.bias = torch.randn(VOCABULARY, generator=generator).to(device)
        self.bias[50:60] = -float("inf")
        self.unit = (torch.randn(ROWS, generator=generator) * spread).to(device)

    def logits(self) -> Tensor:
        """Transformed, float32."""
        x = self.hidden.float() @ self.weight.float().t() + self.bias
        return x * (TRANSFORM.scale / TRANSFORM.temperature)


def folded(case: Case) -> tuple[Exponentials, RowStatistics]:
    kept = room(case.unit.clone())
    sums = RowStatistics.empty(ROWS, Folded(), torch.float32, case.unit.device)
    common = (case.hidden, case.weight, case.bias, case.targets, None, sums, 0, TRANSFORM, Folded())
    fold_product_triton(*common, exponentials=kept)
    return kept, sums


@pytest.mark.parametrize("spread", [1.0, 120.0])
def test_fold_keeps_what_its_twin_keeps(spread: float, device: torch.device) -> None:
    case = Case(device, spread)
    ours, _ = folded(case)
    twin = room(case.unit.clone())
    keep_exponentials_torch(case.logits(), case.targets, SPAN_COLUMNS, twin)
    assert bool((twin.excess != 0).any()) == (spread > 1)
    # a float32 logit of 700 is off by 6e-5
    torch.testing.assert_close(ours.excess, twin.excess, rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(ours.tile, twin.tile, rtol=2**-6, atol=1e-35)
    torch.testing.assert_close(ours.sums, twin.sums, rtol=2**-7, atol=1e-35)
    assert (ours.tile.as_strided((ROWS, 8), (ours.tile.stride(0), 1), VOCABULARY + 4) == 7).all()
    assert (ours.tile.gather(1, case.targets.unsqueeze(1)) == 0).all()


def test_the_statistics_are_those_of_a_fold_that_keeps_nothing(device: torch.device) -> None:
    case = Case(device, 120.0)
    _, ours = folded(case)
    plain = RowStatistics.empty(ROWS, Folded(), torch.float32, device)
    rest = (case.bias, case.targets, None, plain, 0, TRANSFORM, Folded())
    fold_product_triton(case.hidden, case.weight, *rest)
    for name, value in vars(ours).items():
        assert torch.equal(value, getattr(plain, name)), name


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("spread", [1.0, 120.0])
def test_finish_makes_a_softmax_of_every_row(
    spread: float, own: bool, device: torch.device
) -> None:
    """Of float64 logits: bfloat16 rounds each probability by 2^-8 at most, twice in a row that had
    to be brought to one unit."""
    case = Case(device, spread)
    kept, sums = folded(case)
    others = finish_exponentials_triton(kept, case.targets, sums.target, own)
    target = torch.exp(sums.target - kept.unit).double()
    total = others.double() + target
    logits = case.logits().double()
    exact = logits.softmax(1)
    place = case.targets.unsqueeze(1)
    if not own:
        assert (kept.tile.gather(1, place) == 0).all()
        exact.scatter_(1, place, 0.0)
    found = kept.tile.double() / total.unsqueeze(1)
    assert torch.isfinite(found).all()
    # logits of 700 in float32 and a unit as far add 1e-3
    rtol = 2**-7 if spread == 1 else 2**-6
    torch.testing.assert_close(found, exact, rtol=rtol, atol=1e-12)
    mass = exact.scatter(1, place, 0.0).sum(1)
    torch.testing.assert_close(others.double() / total, mass, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("own", [False, True])
def test_finish_and_its_twin(own: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    vocabulary = 3 * BLOCK_V + 17
    unit = torch.randn(5, generator=generator)
    ours = room(unit.clone().to(device), vocabulary)
    filled = torch.rand(ours.tile.shape, generator=generator) + 0.5
    ours.tile.copy_(filled)
    ours.excess.zero_()
    ours.excess[:, 1] = torch.tensor([90.0, 0.0, 95.5, -130.0], device=device)
    ours.excess[:, 3] = torch.tensor([-121.0, -125.0, -121.5, -122.0], device=device)
    ours.excess[2, 4] = -140.0
    ours.sums.copy_(torch.rand(ours.sums.shape, generator=generator) * 100)
    twin = Exponentials(*(x.clone() for x in vars(ours).values()))
    targets = torch.tensor([0, 5, 700, 300, 784], device=device)
    logits = torch.randn(5, generator=generator).to(device)
    found = finish_exponentials_triton(ours, targets, logits, own)
    wanted = finish_exponentials_torch(twin, targets, logits, own)
    # Triton's interpreter cuts bfloat16 off where torch rounds it
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0)
    torch.testing.assert_close(ours.unit, twin.unit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.tile, twin.tile, rtol=2**-7, atol=2e-38)
    torch.testing.assert_close(found[[0, 2]], ours.sums.sum(0)[[0, 2]], rtol=1e-6, atol=0)
    assert float(twin.unit[3] - unit[3]) == pytest.approx(-121.0 / LOG2E, rel=1e-4)


@pytest.mark.parametrize("terms", [False, True])
def test_gradient_of_exponentials(terms: bool, device: torch.device) -> None:
    """That of the logits that they are the exponentials of."""
    generator = torch.Generator().manual_seed(2)
    rows, width = 5, 300

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    bias = normal(width)
    bias[7:20] = -float("inf")
    raw, centre = normal(rows, width) * 4, normal(rows)
    z = (raw + bias) * (TRANSFORM.scale / TRANSFORM.temperature)
    coefficients = RowCoefficients(
        centre, *(normal(rows).abs() + 0.1 for _ in range(1)), *(normal(rows) for _ in range(4)),
        *(normal(rows) if terms else None for _ in range(3)),
    )  # fmt: skip
    targets = torch.tensor([0, 8, 299, 100, 21], device=device)
    tile = torch.exp(z - centre.unsqueeze(1))
    found, twin, wanted = (torch.empty_like(raw) for _ in range(3))
    rest = (bias, targets, None, coefficients, 0, TRANSFORM)
    gradient_tile_triton(tile, *rest, found, exponentials=True)
    gradient_tile_torch(tile.clone(), *rest, twin, exponentials=True)
    gradient_tile_torch(raw.clone(), *rest, wanted)
    for result in (found, twin):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    assert (found[:, 7:20] == 0).all()
