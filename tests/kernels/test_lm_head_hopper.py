"""The head's products with softmax epilogues against the twins of their two halves.

Triton's interpreter multiplies the bits of bfloat16 as integers: float16 here, bfloat16 on a GPU.
"""

import itertools

import pytest
import torch
from lm_head_checks import exact_where_interpreted
from torch import Tensor

from lowpeak.kernels.hopper_products import products_serve
from lowpeak.kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch
from lowpeak.kernels.lm_head_fold_product import fold_product_triton
from lowpeak.kernels.lm_head_gradient import RowCoefficients, gradient_tile_torch
from lowpeak.kernels.lm_head_gradient_product import gradient_product_triton
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

TRANSFORMS = {
    "identity": TileTransform(),
    "all": TileTransform(scale=0.7, temperature=1.3),
}
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.cuda)]
WIDTH = 72
# Two spans and a block of the vocabulary that ends outside of it.
VOCABULARY = 2300


class Problem:
    """Rows, a weight, targets in every part of the vocabulary, and what is optional."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device, optional: bool) -> None:
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.hidden = normal(rows, WIDTH).to(dtype)
        self.weight = normal(VOCABULARY, WIDTH).to(dtype)
        targets = torch.linspace(0, VOCABULARY - 1, rows).long()
        self.targets = targets[torch.randperm(rows, generator=generator)].to(device)
        self.bias = self.temperature = None
        if optional:
            self.bias = normal(VOCABULARY)
            self.bias[5:40] = -float("inf")
            self.bias[self.targets] = 0.5
            self.temperature = normal(rows).exp()

    def logits(self, first: int, last: int) -> Tensor:
        """Raw logits of a block of the vocabulary, from the same factors in float32."""
        return self.hidden.float() @ self.weight[first:last].float().t()

    def bias_of(self, first: int, last: int) -> Tensor | None:
        return None if self.bias is None else self.bias[first:last]


def folded_both(
    problem: Problem, transform: TileTransform, folded: Folded, cuts: tuple[int, ...]
) -> tuple[RowStatistics, RowStatistics]:
    rows, device = problem.hidden.size(0), problem.hidden.device
    ours, theirs = (RowStatistics.empty(rows, folded, torch.float32, device) for _ in range(2))
    for first, last in itertools.pairwise((0, *cuts, VOCABULARY)):
        rest = (problem.bias_of(first, last), problem.targets, problem.temperature)
        block = problem.weight[first:last]
        fold_product_triton(problem.hidden, block, *rest, ours, first, transform, folded)
        fold_tile_torch(problem.logits(first, last), *rest, theirs, first, transform, folded)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("rows", "optional", "cuts"), [(1, False, ()), (33, True, (800,)), (130, False, (256,))]
)
def test_folds_what_a_tile_in_memory_folds(
    dtype: torch.dtype,
    name: str,
    rows: int,
    optional: bool,
    cuts: tuple[int, ...],
    device: torch.device,
) -> None:
    problem = Problem(rows, dtype, device, optional)
    for folded in (Folded(), Folded(entropy=True, squares=True, mean=True, top1=True)):
        ours, theirs = folded_both(problem, TRANSFORMS[name], folded, cuts)
        for field, value in vars(ours).items():
            torch.testing.assert_close(
                value, getattr(theirs, field), rtol=2e-5, atol=2e-4, msg=lambda m, f=field: f + m
            )


def test_keeps_the_raw_logits_where_they_are_wanted(device: torch.device) -> None:
    problem = Problem(33, torch.float16, device, optional=True)
    rest = (problem.bias, problem.targets, problem.temperature)
    found, wanted = (RowStatistics.empty(33, Folded(), torch.float32, device) for _ in range(2))
    kept = torch.full((33, VOCABULARY + 4), 7.0, device=device)
    options = (0, TRANSFORMS["all"], Folded())
    fold_product_triton(
        problem.hidden, problem.weight, *rest, found, *options, kept[:, :VOCABULARY]
    )
    fold_product_triton(problem.hidden, problem.weight, *rest, wanted, *options)
    torch.testing.assert_close(
        kept[:, :VOCABULARY], problem.logits(0, VOCABULARY), rtol=1e-5, atol=1e-4
    )
    assert (kept[:, VOCABULARY:] == 7.0).all()
    assert torch.equal(found.sum_exp, wanted.sum_exp)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Bitwise: in any place among any number of rows."""
    problem = Problem(33, torch.float16, device, optional=False)
    hidden, weight = map(exact_where_interpreted, (problem.hidden, problem.weight))
    folded = Folded(entropy=True)

    def statistics(order: Tensor) -> RowStatistics:
        found = RowStatistics.empty(order.numel(), folded, torch.float32, device)
        rows, targets = hidden[order], problem.targets[order]
        fold_product_triton(rows, weight, None, targets, None, found, 0, TRANSFORMS["all"], folded)
        return found

    everywhere = statistics(torch.arange(33, device=device))
    order = torch.tensor([32, 7, 0], device=device)
    for name, value in vars(statistics(order)).items():
        expected = getattr(everywhere, name)
        assert torch.equal(value, expected[order] if expected.numel() else expected), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    ("rows", "optional", "terms"),
    [(1, False, False), (33, True, True), (130, False, True), (130, True, False)],
)
def test_gradient_is_that_of_a_tile_in_memory(
    dtype: torch.dtype, name: str, rows: int, optional: bool, terms: bool, device: torch.device
) -> None:
    problem, transform = Problem(rows, dtype, device, optional), TRANSFORMS[name]
    statistics, _ = folded_both(problem, transform, Folded(), ())
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(rows, generator=generator).to(device)

    centre = torch.maximum(statistics.maximum, statistics.target)
    total = statistics.sum_exp * (statistics.maximum - centre).exp()
    total += (statistics.target - centre).exp()
    coefficients = RowCoefficients(
        centre=centre,
        inverse_sum=total.reciprocal(),
        log_sum=total.log(),
        linear=normal(),
        target=normal(),
        target_rest=normal(),
        log_linear=normal() if terms else None,
        square=normal() if terms else None,
        constant=normal() if terms else None,
    )
    first, last = 700, VOCABULARY
    rest = (problem.bias_of(first, last), problem.targets, problem.temperature, coefficients, first)
    found = torch.full((rows, last - first + 8), 7.0, device=device).to(dtype)
    gradient_product_triton(
        problem.hidden, problem.weight[first:], *rest, transform, found[:, : last - first]
    )
    wanted = torch.empty(rows, last - first, device=device)
    gradient_tile_torch(problem.logits(first, last), *rest, transform, wanted)
    torch.testing.assert_close(
        found[:, : last - first].float(), wanted, rtol=torch.finfo(dtype).eps, atol=2e-4
    )
    assert (found[:, last - first :] == 7.0).all()


def test_serves_what_the_copies_can_read(device: torch.device) -> None:
    hidden = torch.zeros(4, 16, device=device, dtype=torch.bfloat16)
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    assert products_serve(hidden, hidden) == on_hopper
    assert not products_serve(hidden, hidden[:, 1:9])
    assert not products_serve(hidden.t(), hidden)
    assert not products_serve(hidden.float(), hidden.float())
