"""fused_lm_head(low_rank=...) beside a float64 head whose weight holds the adapters."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from lm_head_checks import (
    ALL_TRANSFORMS,
    OUTPUTS,
    Case,
    Transform,
    error,
    largest,
    make_case,
    upstream_for,
)
from lm_head_oracle import Evaluation, statistics, transformed_logits
from lm_head_tolerances import gradient_tolerance, statistics_dtype, value_tolerance
from torch import Tensor

from lowpeak import LogitTransform, LowRank, fused_lm_head
from lowpeak.lm_head import chunk_walk, expectation_counts, reset_expectations
from lowpeak.lm_head.planner import TilePlan, override

BASE = ("hidden", "weight", "bias")


def tiles() -> AbstractContextManager[None]:
    """Tiles and chunks that divide neither rows nor vocabulary."""
    return override(TilePlan(16, 50), TilePlan(16, 50), TilePlan(16, 1), TilePlan(16, 1))


def adapters(
    case: Case, ranks: Sequence[int], dtype: torch.dtype | None = None, seed: int = 3
) -> list[LowRank]:
    """Adapters that change the logits about as much as the weight makes them."""
    generator = torch.Generator().manual_seed(seed)
    width, dtype = case.weight.size(1), dtype or case.weight.dtype

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(case.weight.device, dtype)

    return [
        LowRank(normal(r, width) / width**0.5, normal(case.vocabulary, r) / r**0.5, 0.5 + place)
        for place, r in enumerate(ranks)
    ]


def leaves_of(
    case: Case, low_rank: Sequence[LowRank], frozen: Sequence[str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Fresh leaves by name, in `dtype` where given."""
    tensors: dict[str, Any] = {name: getattr(case, name) for name in BASE}
    for place, adapter in enumerate(low_rank):
        tensors |= {f"a{place}": adapter.a, f"b{place}": adapter.b}
    return {
        name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_(name not in frozen)
        for name, x in tensors.items()
        if x is not None
    }


def backward(
    outputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Gradients of the leaves."""
    torch.autograd.backward(
        [outputs[name] for name in upstream], [g.to(outputs[name].dtype) for name, g in
        upstream.items()]
    )  # fmt: skip
    return {name: leaf.grad for name, leaf in leaves.items()}


def full_logits(
    case: Case,
    low_rank: Sequence[LowRank],
    upstream: Mapping[str, Tensor],
    frozen: Sequence[str],
    logits_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Evaluation:
    """Plain torch, as PEFT computes: base logits, then each adapter's added to them."""
    leaves = leaves_of(case, low_rank, frozen, logits_dtype)
    hidden, bias = leaves["hidden"], leaves.get("bias")
    masked = None if bias is None else torch.isneginf(bias)
    if bias is not None:
        bias = bias.masked_fill(masked, 0.0)
    raw = torch.nn.functional.linear(hidden, leaves["weight"], bias)
    for place, adapter in enumerate(low_rank):
        added = hidden @ leaves[f"a{place}"].t() @ leaves[f"b{place}"].t()
        raw = raw + added * adapter.scale
    if masked is not None:
        raw = raw.masked_fill(masked, -float("inf"))
    logits = after_projection(raw, case.transform, dtype)
    outputs = statistics(logits, case.targets, case.ignore_index)
    gradients = backward(outputs, upstream, leaves)
    finite = logits.detach()[torch.isfinite(logits.detach())]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return Evaluation({k: v.detach() for k, v in outputs.items()}, gradients, size)


def after_projection(raw: Tensor, transform: Transform, dtype: torch.dtype) -> Tensor:
    """The oracle's transform of raw logits [..., V]: those of an identity projection."""
    masked = torch.isneginf(raw)
    plain = raw.to(dtype).masked_fill(masked, 0.0)
    eye = torch.eye(plain.size(-1), dtype=dtype, device=plain.device)
    return transformed_logits(plain, eye, None, transform, dtype).masked_fill(masked, -float("inf"))


def run(
    case: Case,
    low_rank: Sequence[LowRank],
    upstream: Mapping[str, Tensor],
    frozen: Sequence[str],
    expected: bool = False,
    **options: Any,
) -> Evaluation:
    """Outputs and gradients of fused_lm_head."""
    leaves = leaves_of(case, low_rank, frozen, None)
    added = [
        LowRank(leaves[f"a{place}"], leaves[f"b{place}"], adapter.scale)
        for place, adapter in enumerate(low_rank)
    ]
    if expected:
        options["expected_grads"] = {name: 3 * x for name, x in upstream.items()}
    result = fused_lm_head(
        leaves["hidden"], leaves["weight"], case.targets, bias=leaves.get("bias"),
        transform=LogitTransform(
            case.transform.scale, case.transform.softcap, case.transform.temperature
        ),
        ignore_index=case.ignore_index, outputs=OUTPUTS, low_rank=added, **options,
    )  # fmt: skip
    outputs = {name: getattr(result, name) for name in OUTPUTS}
    gradients = backward(outputs, upstream, leaves)
    return Evaluation({k: v.detach() for k, v in outputs.items()}, gradients, 0.0)


def assert_exact(
    case: Case,
    low_rank: Sequence[LowRank],
    names: Sequence[str] = OUTPUTS,
    frozen: Sequence[str] = ("weight", "bias"),
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> Evaluation:
    """Outputs and gradients lie within the tolerances of the float64 head."""
    dtype = compute_dtype or case.hidden.dtype
    upstream = upstream_for(case, names)
    ours = run(case, low_rank, upstream, frozen, **options)
    true = full_logits(case, low_rank, upstream, frozen)
    plain = full_logits(case, low_rank, upstream, frozen, dtype, statistics_dtype(dtype))
    for name, value in ours.outputs.items():
        if name == "is_top1":
            continue
        rounding = error(plain.outputs[name], true.outputs[name])
        allowed = value_tolerance(rounding, true.largest_logit, dtype)
        assert error(value, true.outputs[name]) <= allowed, name
    steepest = sum(largest(x) for x in upstream.values())
    operand = max(largest(x) for x in (case.hidden, case.weight)) + 1
    for name, expected in true.gradients.items():
        gradient = ours.gradients[name]
        if name in frozen:
            assert gradient is None, name
            continue
        reference = plain.gradients[name]
        assert gradient is not None
        assert expected is not None
        assert reference is not None
        allowed = gradient_tolerance(
            error(reference, expected), largest(expected), 4 * steepest * operand,
            gradient.dtype, dtype,
        )  # fmt: skip
        assert gradient.shape == expected.shape, name
        found = error(gradient, expected)
        assert found <= allowed, f"{name}: error {found:.3e}, allowed {allowed:.3e}"
    return ours


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
@pytest.mark.parametrize("frozen", [("weight", "bias"), ()], ids=["frozen", "trained"])
@pytest.mark.parametrize("ranks", [(1,), (2,), (5,), (16,), (3, 8), (4, 1, 16)], ids=str)
def test_ranks_in_float64(
    ranks: tuple[int, ...],
    frozen: tuple[str, ...],
    expected: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vocabulary in parts that are put together one by one."""
    monkeypatch.setattr(chunk_walk, "join_columns", lambda inputs: 50)
    case = make_case(40, 127, 20, torch.float64, device)
    reset_expectations()
    with tiles():
        assert_exact(case, adapters(case, ranks), OUTPUTS, frozen, expected=expected)
    if expected:
        assert expectation_counts()["fused_lm_head"].held == 1


@pytest.mark.parametrize("transform", ALL_TRANSFORMS)
@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)  # fmt: skip
def test_dtypes_and_transforms(
    dtype: torch.dtype, expected: bool, transform: str, device: torch.device
) -> None:
    case = make_case(40, 127, 20, dtype, device, transform=ALL_TRANSFORMS[transform])
    with tiles():
        for names in (("log_probs",), OUTPUTS):
            assert_exact(case, adapters(case, (4, 2)), names, expected=expected)


@pytest.mark.parametrize("frozen", [
    ("weight", "bias", "hidden"), ("weight", "bias", "a0"), ("weight", "bias", "b0"),
    ("weight", "bias", "a0", "b0"), ("a0", "b0"), ("hidden", "bias"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
def test_any_part_may_be_frozen(
    frozen: tuple[str, ...], expected: bool, device: torch.device
) -> None:
    case = make_case(40, 127, 20, device=device)
    with tiles():
        assert_exact(case, adapters(case, (3,)), ("log_probs",), frozen, expected=expected)


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
def test_float32_adapters_beside_a_bfloat16_head(expected: bool, device: torch.device) -> None:
    """PEFT's default: the logits have the head's dtype, the adapters' gradients are float32."""
    case = make_case(40, 127, 20, torch.bfloat16, device)
    with tiles():
        ours = assert_exact(case, adapters(case, (8,), torch.float32), expected=expected)
    assert ours.gradients["a0"].dtype == ours.gradients["b0"].dtype == torch.float32


def test_autocast(device: torch.device) -> None:
    """A float32 head and adapters, with products in bfloat16."""
    case = make_case(40, 127, 20, torch.bfloat16, device)
    low_rank = adapters(case, (8,))
    wide = [replace(x, a=x.a.float(), b=x.b.float()) for x in low_rank]
    with tiles(), torch.autocast(device.type, torch.bfloat16):
        leaves = leaves_of(case.to(torch.float32), wide, ("weight", "bias"), None)
        low = LowRank(leaves["a0"], leaves["b0"], low_rank[0].scale)
        result = fused_lm_head(
            leaves["hidden"], leaves["weight"], case.targets, bias=leaves["bias"], low_rank=low
        )
    upstream = upstream_for(case, ("log_probs",))
    gradients = backward({"log_probs": result.log_probs}, upstream, leaves)
    narrow = run(case, low_rank, upstream, ("weight", "bias"))
    assert error(result.log_probs, narrow.outputs["log_probs"]) <= 1e-5
    for name in ("hidden", "a0", "b0"):
        assert gradients[name].dtype == torch.float32
        assert error(gradients[name], narrow.gradients[name]) <= 2**-7 * largest(gradients[name])


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
def test_rows_ignored_or_without_gradient(expected: bool, device: torch.device) -> None:
    """Some rows, then all of them, ignored; an upstream gradient of zero in others."""
    for rows, ignored in ((40, 0.5), (5, 1.1), (0, 0.0)):
        case = make_case(rows, 60, 12, device=device, ignored=ignored)
        ours = assert_exact(case, adapters(case, (2,)), ("log_probs",), expected=expected)
        assert ours.gradients["b0"].shape == (60, 2)
    case = make_case(40, 60, 12, torch.float64, device)
    upstream = upstream_for(case, ("log_probs",))
    upstream["log_probs"][5:30] = 0
    low_rank = adapters(case, (2,))
    ours = run(case, low_rank, upstream, ("weight", "bias"), expected)
    true = full_logits(case, low_rank, upstream, ("weight", "bias"))
    for name in ("hidden", "a0", "b0"):
        assert error(ours.gradients[name], true.gradients[name]) <= 1e-12


def test_every_row_without_synchronisation(device: torch.device) -> None:
    case = make_case(40, 127, 20, device=device)
    with tiles():
        assert_exact(case, adapters(case, (3,)), row_selection="all")


def test_masked_tokens_and_a_temperature_of_each_row(device: torch.device) -> None:
    temperature = torch.linspace(0.5, 2.0, 40, device=device)
    case = make_case(40, 127, 20, device=device, ignored=0.0)
    case.bias[50:] = -float("inf")
    case = Case(
        case.hidden, case.weight, case.targets % 50, case.bias,
        Transform(temperature=temperature),
    )  # fmt: skip
    names = ("log_probs", "entropy", "log_sum_sq_probs", "log_normalizer")
    upstream, low_rank = upstream_for(case, names), adapters(case, (3,))
    for expected in (False, True):
        ours = run(case, low_rank, upstream, ("weight", "bias"), expected)
        true = full_logits(case, low_rank, upstream, ("weight", "bias"))
        for name in ("hidden", "a0", "b0"):
            assert error(ours.gradients[name], true.gradients[name]) <= 1e-4, name


def test_a_wrong_expectation_recomputes(device: torch.device) -> None:
    case = make_case(40, 127, 20, torch.float64, device)
    upstream, low_rank = upstream_for(case, ("log_probs",)), adapters(case, (3,))
    wrong = {"log_probs": upstream["log_probs"].square() + 1}
    reset_expectations()
    ours = run(case, low_rank, upstream, ("weight", "bias"), expected_grads=wrong)
    true = full_logits(case, low_rank, upstream, ("weight", "bias"))
    assert expectation_counts()["fused_lm_head"].missed == 1
    for name in ("hidden", "a0", "b0"):
        assert error(ours.gradients[name], true.gradients[name]) <= 1e-12


def test_an_expectation_asked_by_chunks(device: torch.device) -> None:
    case = make_case(40, 127, 20, torch.float64, device)
    upstream, low_rank = upstream_for(case, ("log_probs",)), adapters(case, (3,))
    flat = upstream["log_probs"].reshape(-1)
    reset_expectations()
    with tiles():
        ours = run(
            case, low_rank, upstream, ("weight", "bias"),
            expected_grads=lambda _, rows: {"log_probs": flat[rows]},
        )  # fmt: skip
    true = full_logits(case, low_rank, upstream, ("weight", "bias"))
    assert expectation_counts()["fused_lm_head"].held == 1
    for name in ("hidden", "a0", "b0"):
        assert error(ours.gradients[name], true.gradients[name]) <= 1e-12


def test_tied_weight(device: torch.device) -> None:
    """The weight is the embedding too: both gradients meet in it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 12, generator=generator, dtype=torch.float64).to(device)
    case = make_case(30, 50, 12, torch.float64, device, bias=False)
    (adapter,) = adapters(case, (3,))
    found = []
    for fused in (True, False):
        leaf = weight.clone().requires_grad_()
        hidden = leaf[case.targets.clamp(min=0)].tanh()
        if fused:
            log_probs = fused_lm_head(hidden, leaf, case.targets, low_rank=adapter).log_probs
        else:
            whole = leaf + adapter.scale * adapter.b @ adapter.a
            log_probs = statistics(hidden @ whole.t(), case.targets, -100)["log_probs"]
        log_probs.sum().backward()
        found.append(leaf.grad)
    assert error(*found) <= 1e-12
