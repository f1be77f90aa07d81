"""fused_lm_head(backend="triton") against the oracle: interpreted on the CPU, compiled on a GPU."""

from dataclasses import replace

import pytest
import torch
from lm_head_checks import (
    ALL_TRANSFORMS,
    DIFFERENTIABLE,
    OUTPUTS,
    Transform,
    assert_exact,
    assert_matches,
    backward,
    call,
    error,
    make_case,
    run,
    upstream_for,
)
from lm_head_oracle import Evaluation

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MINUS_INFINITY = float("-inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    "shape", [(0, 7, 8), (1, 1, 8), (1, 7, 5), (33, 127, 20), (9, 1000, 16), (2, 4099, 8)], ids=str
)
def test_shapes(
    shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Vocabularies below, at and beyond a block of the kernels; 4099 takes two."""
    assert_exact(make_case(*shape, dtype, device, bias=bias), backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_TRANSFORMS)
def test_transforms(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(12, 130, 20, dtype, device, transform=ALL_TRANSFORMS[name])
    assert_exact(case, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a13_temperature_per_token(dtype: torch.dtype, device: torch.device) -> None:
    temperature = (torch.rand(12, generator=torch.Generator().manual_seed(3)) + 0.5).to(device)
    transform = Transform(scale=0.8, softcap=9.0, temperature=temperature)
    case = make_case(12, 130, 20, dtype, device, transform=transform)
    for row_selection in ("valid", "all"):
        assert_exact(case, backend="triton", row_selection=row_selection)


@pytest.mark.parametrize("softcap", [1.0, 8.0, 1000.0])
def test_a2_softcap_of_small_and_huge_logits(softcap: float, device: torch.device) -> None:
    """tanh of small arguments keeps its relative accuracy, of large ones it saturates.

    A GPU takes many rows: of few, the largest error is a matter of luck, up to 10 times apart.
    """
    rows = 12 if device.type == "cpu" else 2000
    for logit_std in (0.01, 1.0, 300.0):
        transform = Transform(softcap=softcap, temperature=0.7)
        case = make_case(rows, 130, 20, device=device, transform=transform, logit_std=logit_std)
        case = replace(case, bias=None)
        assert_exact(case, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_of_each_output(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(12, 130, 20, dtype, device, transform=ALL_TRANSFORMS["all"])
    assert_exact(case, upstream=upstream_for(case, (name,)), backend="triton")


@pytest.mark.parametrize("outputs", [(name,) for name in OUTPUTS], ids=str)
def test_each_output_alone(outputs: tuple[str, ...], device: torch.device) -> None:
    assert_exact(make_case(12, 130, 20, device=device), outputs, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row_selection", ["valid", "all"])
def test_many_tiles(row_selection: str, dtype: torch.dtype, device: torch.device) -> None:
    """64 KiB of scratch: several tiles along both axes, the last ones partial."""
    case = make_case(33, 1000, 20, dtype, device, transform=ALL_TRANSFORMS["all"])
    assert_exact(case, backend="triton", scratch_bytes=1 << 16, row_selection=row_selection)


@pytest.mark.parametrize("transform", [
    Transform(), Transform(softcap=4.0, temperature=0.7), Transform(scale=-0.5),
    Transform(scale=0.0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("columns", [slice(100, 128), slice(0, 64), slice(1, 128)], ids=str)
def test_a7_masked_columns(columns: slice, transform: Transform, device: torch.device) -> None:
    case = make_case(12, 128, 20, device=device, transform=transform)
    bias = case.bias.clone()
    bias[columns] = MINUS_INFINITY
    kept = torch.isfinite(bias).nonzero().squeeze(1)
    targets = case.targets.where(case.targets < 0, kept[case.targets % kept.numel()])
    assert_exact(replace(case, bias=bias, targets=targets), backend="triton")


@pytest.mark.parametrize("where", [slice(0, 900), slice(100, 1000)], ids=str)
def test_a7_whole_tiles_masked(where: slice, device: torch.device) -> None:
    case = make_case(9, 1000, 20, device=device)
    bias = case.bias.clone()
    bias[where] = MINUS_INFINITY
    kept = torch.isfinite(bias).nonzero().squeeze(1)
    case = replace(case, bias=bias, targets=kept[case.targets.clamp(min=0) % kept.numel()])
    assert_exact(case, backend="triton", scratch_bytes=1 << 16)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_common_offset(offset: float, device: torch.device) -> None:
    case = make_case(12, 130, 20, device=device)
    assert_exact(replace(case, bias=case.bias + offset), backend="triton")


@pytest.mark.parametrize("target", [0, 64, 129])
@pytest.mark.parametrize("gap", [20.75, 104.0, -104.0, -3000.0])
def test_certain_and_impossible_targets(gap: float, target: int, device: torch.device) -> None:
    logits = torch.zeros(130, 1)
    logits[target] = gap
    case = make_case(1, 130, 1, device=device, ignored=0.0)
    case = replace(
        case,
        hidden=torch.ones(1, 1, device=device),
        weight=logits.to(device),
        targets=torch.tensor([target], device=device),
        bias=None,
    )
    ours = assert_exact(case, backend="triton")
    if gap == 20.75:
        expected = -129 * torch.tensor(-20.75, dtype=torch.float64).exp()
        assert abs(float(ours.outputs["log_probs"]) / float(expected) - 1) < 1e-4


def test_top1_ties(device: torch.device) -> None:
    weight = torch.tensor([0.0, 0.0, 3.0, 1.0, 2.0, 3.0, -1.0], device=device).unsqueeze(1)
    case = make_case(7, 7, 1, device=device, bias=False)
    hidden, targets = torch.ones(7, 1, device=device), torch.arange(7, device=device)
    ours = run(
        replace(case, hidden=hidden, weight=weight, targets=targets), ("is_top1",), backend="triton"
    )
    assert ours.outputs["is_top1"].tolist() == [i == 2 for i in range(7)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_torch_backend(dtype: torch.dtype, device: torch.device) -> None:
    """Same tiles, same formula: the backends differ by roundoff of the statistics only."""
    case = make_case(33, 300, 20, dtype, device, transform=ALL_TRANSFORMS["all"])
    upstream = upstream_for(case)
    triton = run(case, OUTPUTS, upstream, backend="triton")
    plain = run(case, OUTPUTS, upstream, backend="torch")
    for name in DIFFERENTIABLE:
        assert error(triton.outputs[name], plain.outputs[name]) <= 1e-5, name
    assert torch.equal(triton.outputs["is_top1"], plain.outputs["is_top1"])
    for name in ("hidden", "weight", "bias"):
        one, two = triton.gradients[name], plain.gradients[name]
        unit = float(two.double().abs().max()) * torch.finfo(dtype).eps
        assert error(one, two) <= 2 * unit + 1e-5, name


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_strides_of_everything(row_selection: str, ignored: float, device: torch.device) -> None:
    """Kernels read bias, targets, temperature and upstream gradients by their strides or a copy."""

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, torch.full_like(tensor, 77)], -1)[..., 0]

    temperature = strided((torch.rand(12) + 0.5).to(device))
    transform = Transform(softcap=9.0, temperature=temperature)
    case = make_case(12, 130, 20, device=device, transform=transform, ignored=ignored)
    case = replace(case, targets=strided(case.targets))
    upstream = {name: strided(value) for name, value in upstream_for(case).items()}
    leaves = case.leaves()
    viewed = {name: strided(leaf) for name, leaf in leaves.items()}
    result = call(case, viewed, OUTPUTS, backend="triton", row_selection=row_selection)
    backward(result, upstream)
    values = {name: getattr(result, name).detach() for name in OUTPUTS}
    ours = Evaluation(values, {name: leaf.grad for name, leaf in leaves.items()}, 0.0)
    assert_matches(case, ours, upstream, (), torch.float32)
    expanded = {name: value[:1].expand(12) for name, value in upstream.items()}
    assert_exact(case, upstream=expanded, backend="triton", row_selection=row_selection)


def test_repeats_are_bitwise_equal(device: torch.device) -> None:
    case = make_case(33, 300, 20, torch.bfloat16, device)
    upstream = upstream_for(case)
    first = run(case, OUTPUTS, upstream, backend="triton", scratch_bytes=1 << 16)
    second = run(case, OUTPUTS, upstream, backend="triton", scratch_bytes=1 << 16)
    for name in OUTPUTS:
        assert torch.equal(first.outputs[name], second.outputs[name]), name
    for name in ("hidden", "weight", "bias"):
        one, two = first.gradients[name], second.gradients[name]
        assert torch.equal(one, two), name


def test_float64_is_refused_in_words(device: torch.device) -> None:
    case = make_case(3, 7, 4, torch.float64, device)
    with pytest.raises(ValueError, match=r"(?s)backend.*float64"):
        run(case, backend="triton")
