"""fused_lm_head against the oracle: shapes, dtypes, transforms, subsets of outputs."""

from collections.abc import Sequence

import pytest
import torch
from lm_head_checks import ALL_TRANSFORMS, OUTPUTS, Case, Transform, assert_exact, error, make_case
from lm_head_checks import run as run_head
from lm_head_tolerances import ALL_DTYPES

# (rows, vocabulary, width). Width 20 and 7 are no multiples of 16. The large shapes run with few
# combinations: their cost is the oracle's.
SHAPES = [
    (0, 7, 20),
    (1, 1, 20),
    (1, 7, 1),
    (2, 127, 7),
    (33, 1, 20),
    (33, 1000, 20),
    (300, 7, 7),
    (300, 127, 20),
]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a4_small_shapes(
    shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    assert_exact(make_case(*shape, dtype, device, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(33, 152064, 8), (300, 32003, 12), (70000, 127, 8), (70000, 7, 5)], ids=str
)
def test_large_shapes(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    assert_exact(make_case(*shape, dtype, device))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_TRANSFORMS)
def test_a2_a3_transforms(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_exact(make_case(33, 127, 20, dtype, device, transform=ALL_TRANSFORMS[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a2_softcap_before_temperature(dtype: torch.dtype, device: torch.device) -> None:
    """Logits far beyond the cap (Gemma 2, head times 40): the order of cap and division shows."""
    transform = Transform(softcap=30.0, temperature=0.7)
    assert_exact(make_case(33, 127, 20, dtype, device, transform=transform, logit_std=60.0))


@pytest.mark.parametrize("shape", [(33,), (3, 11), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a13_temperature_per_token(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    temperature = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    transform = Transform(scale=0.8, softcap=9.0, temperature=temperature.to(device))
    assert_exact(make_case(shape, 127, 20, dtype, device, transform=transform))


def test_a13_temperature_per_token_equals_the_float(device: torch.device) -> None:
    case = make_case(17, 40, 8, device=device, transform=Transform(temperature=0.7))
    tensor = torch.full((17,), 0.7, device=device)
    per_token = make_case(17, 40, 8, device=device, transform=Transform(temperature=tensor))
    single, each = run_head(case), run_head(per_token)
    for name in OUTPUTS:
        assert error(single.outputs[name], each.outputs[name]) <= 1e-5, name


SUBSETS: list[Sequence[str]] = [
    *[(name,) for name in OUTPUTS],
    ("log_probs", "entropy"),
    ("entropy", "log_probs"),
    ("log_probs", "log_normalizer"),
    ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ["log_sum_sq_probs", "is_top1"],
]


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("outputs", SUBSETS, ids=lambda names: "+".join(names))
def test_subsets_of_outputs(
    outputs: Sequence[str], row_selection: str, device: torch.device
) -> None:
    """Whatever is asked for alone equals the same output among all."""
    case = make_case(33, 127, 20, device=device)
    ours = assert_exact(case, outputs, row_selection=row_selection)
    everything = run_head(case, row_selection=row_selection)
    for name in outputs:
        assert error(ours.outputs[name], everything.outputs[name]) <= 2e-6, name


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 10**6])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_ignored_rows(
    ignore_index: int, ignored: float, row_selection: str, device: torch.device
) -> None:
    """Ignored rows are exactly 0 in every output; ignore_index may lie inside the vocabulary."""
    case = make_case((3, 11), 127, 20, device=device, ignored=ignored, ignore_index=ignore_index)
    ours = assert_exact(case, row_selection=row_selection)
    for name, value in ours.outputs.items():
        assert (value[case.targets == ignore_index] == 0).all(), name


def test_default_outputs_are_log_probs_alone(device: torch.device) -> None:
    from lowpeak import fused_lm_head

    case = make_case(9, 31, 8, device=device, bias=False)
    result = fused_lm_head(case.hidden, case.weight, case.targets)
    assert result._fields == OUTPUTS
    assert [value is None for value in result] == [False, True, True, True, True, True]
    expected = run_head(case, ("log_probs",)).outputs["log_probs"]
    assert torch.equal(result.log_probs, expected)


def test_top1_ties_go_to_the_first_column(device: torch.device) -> None:
    """Integer logits, exact in every dtype: columns 2 and 5 tie at the top, 0 and 1 below."""
    weight = torch.tensor([0.0, 0.0, 3.0, 1.0, 2.0, 3.0, -1.0], device=device).unsqueeze(1)
    targets = torch.tensor([0, 1, 2, 3, 4, 5, 6], device=device)
    for dtype in ALL_DTYPES:
        case = Case(torch.ones(7, 1, device=device, dtype=dtype), weight.to(dtype), targets)
        for options in ({}, {"row_selection": "all"}):
            ours = run_head(case, ("is_top1",), **options)
            assert ours.outputs["is_top1"].tolist() == [i == 2 for i in range(7)], dtype


def test_top1_tie_across_the_whole_vocabulary(device: torch.device) -> None:
    """All logits equal: only column 0 is top 1, in whatever tile the target lies."""
    targets = torch.tensor([0, 1, 500, 4998, 4999], device=device)
    zeros = torch.zeros(5000, 8, device=device)
    case = Case(torch.ones(5, 8, device=device), zeros, targets)
    ours = run_head(case, ("is_top1", "entropy"))
    assert ours.outputs["is_top1"].tolist() == [True, False, False, False, False]
    assert error(ours.outputs["entropy"], torch.full((5,), 5000.0, device=device).log()) <= 2e-6
