"""fused_divergence in one pass: expected gradients, frozen heads, budgets and what they cost."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from divergence_checks import (
    BETAS,
    Pair,
    assert_exact,
    call,
    evaluate,
    make_pair,
    run,
    upstream_for,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_head_checks import Transform, error, largest
from lm_head_memory import measure
from lm_head_tolerances import ALL_DTYPES
from torch import Tensor

from lowpeak.lm_head import backward as head_backward
from lowpeak.lm_head import divergence_one_pass
from lowpeak.lm_head import tiles as head_tiles
from lowpeak.lm_head.divergence_plan import override_one_pass
from lowpeak.lm_head.expectation import expectation_counts, reset_expectations

MiB = 1 << 20
EVERYTHING = {
    "student_transform": Transform(scale=0.5, softcap=6.0, temperature=0.9),
    "teacher_transform": Transform(softcap=9.0, temperature=0.8),
}


@pytest.fixture(autouse=True)
def _counts_from_zero() -> Iterator[None]:
    reset_expectations()
    yield
    reset_expectations()


def counted() -> tuple[int, int]:
    """How often expectations held, and how often they did not."""
    counts = expectation_counts()["fused_divergence"]
    return counts.held, counts.missed


def expecting(pair: Pair, factor: float = 3.0) -> dict[str, Tensor]:
    """The upstream gradients of upstream_for, up to a factor."""
    return {"expected_grads": upstream_for(pair) * factor}


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Multiply-adds, twice each, of every product that the passes make from here on."""
    made: list[int] = []

    def counting(function: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[..., None]:
        def counted(out: Tensor, a: Tensor, b: Tensor) -> None:
            made.append(2 * a.size(0) * a.size(1) * b.size(1))
            function(out, a, b)

        return counted

    for module in (divergence_one_pass, head_backward, head_tiles):
        for name in ("product_into", "add_product"):
            if name in vars(module):
                monkeypatch.setattr(module, name, counting(vars(module)[name]))
    return made


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("plan", [(90, 1000), (32, 384)], ids=["one group", "groups"])
def test_expected_gradients_are_exact(
    plan: tuple[int, int], beta: float, dtype: torch.dtype, device: torch.device
) -> None:
    pair = make_pair(90, 1000, beta, dtype, device, **EVERYTHING)
    with override_one_pass(*plan):
        assert_exact(pair, **expecting(pair))
    assert counted() == (1, 0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_frozen_heads_need_no_expectation(
    dtype: torch.dtype, beta: float, device: torch.device
) -> None:
    pair = make_pair(90, 1000, beta, dtype, device, **EVERYTHING)
    for plan in ((90, 1000), (32, 384)):
        with override_one_pass(*plan):
            assert_exact(pair, frozen=("weight", "bias"))
    assert counted() == (0, 0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("frozen", [("hidden",), ("bias",), ("hidden", "weight")], ids=str)
def test_every_set_of_gradients(frozen: tuple[str, ...], beta: float, device: torch.device) -> None:
    pair = make_pair((3, 7), 130, beta, torch.bfloat16, device)
    for row_selection in ("valid", "all"):
        assert_exact(pair, frozen=frozen, row_selection=row_selection, **expecting(pair))
    assert counted() == (2, 0)


@pytest.mark.parametrize(("beta", "expected", "frozen", "multiple"), [
    (0.0, True, (), 8), (0.5, True, (), 8), (1.0, True, (), 8),
    (0.0, False, ("weight", "bias"), 6), (0.5, False, ("weight", "bias"), 6),
    (0.0, False, (), 12), (0.5, False, (), 12),
    (0.0, True, ("hidden", "bias"), 6), (0.5, False, ("hidden", "weight", "bias"), 4),
])  # fmt: skip
def test_operations(
    beta: float,
    expected: bool,
    frozen: tuple[str, ...],
    multiple: int,
    operations: list[int],
    device: torch.device,
) -> None:
    """N V H times 2 for each head's logits and each gradient; more only without expectation."""
    pair = make_pair(32, 1024, beta, device=device, width=16, teacher_width=16, ignored=0.0)
    ours = run(
        pair,
        None if len(frozen) == 3 else upstream_for(pair),
        frozen,
        **(expecting(pair) if expected else {}),
    )
    assert torch.isfinite(ours.divergence).all()
    assert sum(operations) == multiple * 32 * 1024 * 16


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_rows_expected_to_be_zero_leave_the_gradients(
    beta: float, operations: list[int], device: torch.device
) -> None:
    """10 of 32 rows: 4 N V H for all logits, 4 for the gradients of 22."""
    pair = make_pair(32, 1024, beta, device=device, width=16, teacher_width=16, ignored=0.0)
    upstream = upstream_for(pair)
    upstream[3::3] = 0.0
    assert int((upstream == 0).sum()) == 10
    assert_exact(pair, upstream=upstream, expected_grads=upstream)
    assert sum(operations) == 4 * (32 + 22) * 1024 * 16
    assert counted() == (1, 0)
    assert_exact(pair, upstream=0 * upstream, expected_grads=0 * upstream)


@pytest.mark.parametrize("wrong", ["noise", "one row", "sign", "zero", "nothing but one"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_wrong_expectations_cost_time_only(wrong: str, beta: float, device: torch.device) -> None:
    pair = make_pair(20, 130, beta, device=device, ignored=0.3)
    upstream = upstream_for(pair)
    row = int(pair.mask.nonzero()[0])
    expected = {
        "noise": upstream * (1 + 1e-4 * torch.randn_like(upstream)),
        "one row": upstream.clone().index_fill(0, torch.tensor([row], device=device), 7.0),
        "sign": upstream.abs(),
        "zero": torch.zeros_like(upstream),
        "nothing but one": torch.zeros_like(upstream).index_fill(
            0, torch.tensor([row], device=device), 1.0
        ),
    }[wrong]
    assert_exact(pair, upstream=upstream, expected_grads=expected)
    assert counted() == (0, 1)


def test_rounding_of_the_expectation_is_no_miss(device: torch.device) -> None:
    """A loss that divides where the expectation multiplied, and a factor far from 1."""
    pair = make_pair(20, 130, 0.5, device=device)
    upstream = upstream_for(pair)
    assert_exact(pair, upstream=upstream, expected_grads=upstream / 3 * 1e20)
    assert_exact(pair, upstream=upstream * 1e-20, expected_grads=upstream)
    assert counted() == (2, 0)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_expectations_of_a_wide_head(narrow: torch.dtype, device: torch.device) -> None:
    """`mask.float()` tells a float64 loss exactly what a mean will be."""
    pair = make_pair(20, 130, 0.5, torch.float64, device)
    upstream = pair.mask.double() / 7
    assert_exact(pair, upstream=upstream, expected_grads=pair.mask.to(narrow))
    assert counted() == (1, 0)


def test_three_misses_end_the_attempts(operations: list[int], device: torch.device) -> None:
    pair = make_pair(32, 256, 0.0, device=device, width=16, teacher_width=16, ignored=0.0)
    upstream = upstream_for(pair)
    unit = 32 * 256 * 16
    for multiple in (16, 16, 16, 12):
        operations.clear()
        run(pair, upstream, expected_grads=upstream.abs())
        assert sum(operations) == multiple * unit
    assert counted() == (0, 3)
    reset_expectations()
    operations.clear()
    run(pair, upstream, expected_grads=upstream)
    assert sum(operations) == 8 * unit


def test_gradients_that_are_not_finite_are_no_miss(device: torch.device) -> None:
    """A gradient scaler finds its size by overflowing; what comes out must not be finite either."""
    pair = make_pair(20, 130, 0.0, device=device)
    ours = run(pair, upstream_for(pair) * float("inf"), **expecting(pair))
    assert not torch.isfinite(ours.gradients["weight"]).any()
    assert counted() == (0, 0)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_small_budget_takes_the_other_path(
    beta: float, operations: list[int], device: torch.device
) -> None:
    """Fewer tokens than would pay: the same gradients from recomputed logits."""
    pair = make_pair(400, 2000, beta, device=device, width=16, teacher_width=16, ignored=0.0)
    logits = 2 * 4 * 2000
    assert_exact(pair, scratch_bytes=8 * logits, **expecting(pair))
    assert sum(operations) == (12 if beta == 0 else 16) * 400 * 2000 * 16
    assert counted() == (0, 0)


@pytest.mark.parametrize(("frozen", "dtype"), [
    ((), torch.bfloat16), (("weight", "bias"), torch.bfloat16), ((), torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_peak_within_the_budget(
    beta: float, frozen: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """N=256, V=2048: both heads' logits are 4 MiB; 2 MiB of scratch hold all casts and sums."""
    pair = make_pair(256, 2048, beta, dtype, device, width=96, teacher_width=64, ignored=0.0)
    leaves = pair.student.leaves(frozen)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    upstream = torch.ones(256, device=device)

    def step() -> object:
        divergence = call(pair, leaves, scratch_bytes=2 * MiB, expected_grads=upstream).divergence
        return divergence, torch.autograd.grad(divergence, wanted, upstream)

    found = measure(step, device)
    elements = sum(leaf.numel() for leaf in wanted)
    allowed = 2 * MiB + 240 * 256 + 16 * 2048 + MiB // 16
    # results, and the kept gradients, of which the weight's float32 sum is scratch
    allowed += elements * dtype.itemsize + (2 if frozen else 1) * 4 * leaves["hidden"].numel()
    allowed += 0 if frozen or dtype != torch.float32 else 4 * leaves["weight"].numel()
    assert found.peak <= allowed, f"{found.peak / MiB:.2f} MiB, allowed {allowed / MiB:.2f}"
    assert found.peak >= elements * dtype.itemsize
    assert counted()[1] == 0


def test_the_budget_counts_casts_of_whole_weights(
    operations: list[int], device: torch.device
) -> None:
    """Float32 weights under autocast: 2 x 2000 x 256 half-precision numbers do not fit 1 MiB."""
    pair = make_pair(64, 2000, 0.0, device=device, width=256, teacher_width=256, ignored=0.0)
    for scratch, multiple in ((MiB, 12), (64 * MiB, 8)):
        operations.clear()
        with torch.autocast(device.type, torch.bfloat16):
            run(pair, upstream_for(pair), scratch_bytes=scratch, **expecting(pair))
        assert sum(operations) == multiple * 64 * 2000 * 256


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
def test_retained_graph_and_no_double_backward(
    frozen: tuple[str, ...], device: torch.device
) -> None:
    pair = make_pair(12, 130, 0.5, torch.bfloat16, device)
    leaves = pair.student.leaves(frozen)
    upstream = upstream_for(pair)
    divergence = call(pair, leaves, expected_grads=upstream).divergence
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    first, again = (
        torch.autograd.grad(divergence, wanted, upstream, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (gradient,) = torch.autograd.grad(
        divergence, leaves["hidden"], upstream.requires_grad_(), create_graph=True
    )
    with pytest.raises(RuntimeError, match="fused_divergence has no double backward"):
        gradient.sum().backward()


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
)
@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
def test_fullgraph(frozen: tuple[str, ...], row_selection: str, device: torch.device) -> None:
    def loss(pair: Pair, leaves: dict[str, Tensor], mask: Tensor) -> Tensor:
        options = {"mask": mask, "row_selection": row_selection, "expected_grads": mask.float()}
        return call(pair, leaves, **options).divergence.sum() / 7

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for rows in (12, 17):
        pair = make_pair(rows, 60, 0.5, device=device, seed=rows)
        results = []
        for function in (compiled, loss):
            leaves = pair.student.leaves(frozen)
            value = function(pair, leaves, pair.mask)
            value.backward()
            results.append(
                (value.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None))
            )
        for found, expected in zip(*results, strict=True):
            assert error(found, expected) <= 1e-6 * max(1.0, largest(expected))
    torch._dynamo.reset()
    assert counted() == ((0, 0) if frozen else (4, 0))


def test_equal_heads_give_exactly_nothing(device: torch.device) -> None:
    for beta in BETAS:
        pair = make_pair(33, 1000, beta, torch.bfloat16, device)
        pair = replace(pair, teacher=pair.student)
        with override_one_pass(16, 384):
            ours = run(pair, upstream_for(pair), **expecting(pair))
        assert (ours.divergence == 0).all()
        assert all((gradient == 0).all() for gradient in ours.gradients.values())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_float16_groups_of_different_sizes(beta: float, device: torch.device) -> None:
    """Each group of tokens has a power of two of its own, from 2^-20 to 2^12."""
    pair = make_pair(90, 1000, beta, torch.float16, device, ignored=0.0)
    exponents = torch.linspace(-20, 12, 90, device=device).round()
    upstream = upstream_for(pair).sign() * torch.exp2(exponents)
    with override_one_pass(24, 512):
        ours = run(pair, upstream, expected_grads=upstream)
    true = evaluate(pair, upstream)
    assert counted() == (1, 0)
    for name, gradient in ours.gradients.items():
        assert error(gradient, true.gradients[name]) <= 2.0**-9 * largest(true.gradients[name])
    small, expected = ours.gradients["hidden"][:20], true.gradients["hidden"][:20]
    assert error(small, expected) <= 2.0**-9 * largest(expected) + 2.0**-24


@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    rows=st.integers(1, 40),
    vocabulary=st.sampled_from([1, 17, 300]),
    beta=st.sampled_from(BETAS),
    dtype=st.sampled_from(ALL_DTYPES),
    frozen=st.sampled_from([(), ("hidden",), ("bias",), ("weight", "bias")]),
    ignored=st.sampled_from([0.0, 0.4]),
    plan=st.sampled_from([(7, 128), (40, 300), None]),
    kind=st.sampled_from(["right", "scaled", "zeros", "noisy", "wrong"]),
    row_selection=st.sampled_from(["valid", "all"]),
    seed=st.integers(0, 99),
)
def test_any_expectation_is_exact(
    rows: int,
    vocabulary: int,
    beta: float,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
    ignored: float,
    plan: tuple[int, int] | None,
    kind: str,
    row_selection: str,
    seed: int,
) -> None:
    reset_expectations()
    pair = make_pair(rows, vocabulary, beta, dtype, ignored=ignored, seed=seed)
    upstream = upstream_for(pair, seed)
    if kind == "zeros":
        upstream[::3] = 0.0
    wrong = {
        "scaled": upstream * -7e-9,
        "noisy": upstream + 1e-3 * upstream_for(pair, seed + 1),
        "wrong": upstream_for(pair, seed + 1),
    }
    options = {"expected_grads": wrong.get(kind, upstream), "row_selection": row_selection}
    with override_one_pass(*plan) if plan else nullcontext():
        assert_exact(pair, upstream=upstream, frozen=frozen, **options)


def test_errors_name_the_argument(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device)
    for wrong, kind in (
        (torch.ones(4, device=device), ValueError),
        (torch.ones(5, dtype=torch.int64, device=device), TypeError),
        ([1.0] * 5, TypeError),
    ):
        with pytest.raises(kind, match="expected_grads"):
            run(pair, expected_grads=wrong)
