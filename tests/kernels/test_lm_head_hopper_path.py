"""fused_lm_head through Hopper's products: interpreted in float16 here, on Hopper in all tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lm_head_checks import (
    Case,
    Transform,
    assert_exact,
    call,
    exact_where_interpreted,
    make_case,
    run,
    upstream_for,
)
from torch import Tensor

from lowpeak.kernels.lm_head_fold_product import SPAN_COLUMNS
from lowpeak.lm_head import backward, chunk_walk, forward, tiles
from lowpeak.lm_head.planner import TilePlan, override, plan_products

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

# Three chunks of the rows that count, some 30 of 40.
CHUNKS = TilePlan(12, 1 << 20)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[list[str]]:
    """Let the products serve wherever they can be computed; the list names those that ran."""
    ran: list[str] = []

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def product(*arguments: Any, **options: Any) -> None:
            ran.append(name)
            original(*arguments, **options)

        monkeypatch.setattr(module, name, product)

    def serve(*factors: Tensor) -> bool:
        return all(x.dtype == torch.float16 and x.stride(1) == 1 for x in factors)

    if device.type == "cpu":
        monkeypatch.setattr(tiles, "products_serve", serve)
    watch(forward, "fold_product_triton")
    watch(chunk_walk, "fold_product_triton")
    watch(backward, "gradient_product_triton")
    yield ran
    assert ran, "no product ran"


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", [(2, 7, 8), (33, 300, 24), (7, 2100, 8)], ids=str)
def test_shapes(
    shape: tuple[int, int, int], bias: bool, device: torch.device, products: list[str]
) -> None:
    assert_exact(make_case(*shape, torch.float16, device, bias=bias), backend="triton")
    assert set(products) == {"fold_product_triton", "gradient_product_triton"}


def test_temperature_of_each_row(device: torch.device, products: list[str]) -> None:
    temperature = (torch.rand(12, generator=torch.Generator().manual_seed(3)) + 0.5).to(device)
    transform = Transform(scale=0.8, temperature=temperature)
    case = make_case(12, 130, 24, torch.float16, device, transform=transform)
    for row_selection in ("valid", "all"):
        assert_exact(case, backend="triton", row_selection=row_selection)


def test_small_scratch(device: torch.device, products: list[str]) -> None:
    """Rows in blocks of 16, and a float32 weight cast by spans of the vocabulary."""
    case = make_case(500, 2 * SPAN_COLUMNS + 9, 8, torch.float16, device)
    assert_exact(case, backend="triton", scratch_bytes=20_000)
    assert products.count("fold_product_triton") > 1
    products.clear()
    wide = make_case(20, 2 * SPAN_COLUMNS + 9, 8, torch.float32, device, bias=False)
    names = ("log_probs",)
    with torch.autocast(device.type, torch.float16):
        run(wide, names, upstream_for(wide, names), backend="triton", scratch_bytes=70_000)
    assert products.count("fold_product_triton") == 3


def test_a_cap_goes_by_tiles_in_memory(device: torch.device, products: list[str]) -> None:
    names = ("log_probs",)
    for transform in (Transform(softcap=5.0), Transform(scale=-1.0)):
        case = make_case(3, 40, 8, torch.float16, device, transform=transform)
        run(case, names, upstream_for(case, names), backend="triton")
        assert products == []
    case = make_case(3, 40, 8, torch.float16, device)
    run(case, names, upstream_for(case, names), backend="triton")


def test_b_a_row_is_bitwise_independent_of_the_batch(
    device: torch.device, products: list[str]
) -> None:
    """Alone, and among others with ignored rows between: the same bits."""
    case = make_case(40, SPAN_COLUMNS + 300, 24, torch.float16, device, bias=False)
    hidden, weight = map(exact_where_interpreted, (case.hidden, case.weight))
    names = ("log_probs", "entropy")

    def outputs(rows: slice) -> tuple[Tensor, Tensor]:
        part = Case(hidden[rows], weight, case.targets[rows])
        leaves = {"hidden": part.hidden, "weight": part.weight}
        result = call(part, leaves, names, backend="triton")
        return result.log_probs, result.entropy

    together = outputs(slice(0, 40))
    for rows in (slice(0, 1), slice(17, 23), slice(39, 40)):
        for whole, alone in zip(together, outputs(rows), strict=True):
            assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("weight", ["trained", "frozen", "expected"])
def test_outputs_are_the_same_bits_with_and_without_gradients(
    weight: str, device: torch.device, products: list[str]
) -> None:
    """So is the ratio of a policy's probabilities to its own from before exactly 1."""
    case = make_case(40, SPAN_COLUMNS + 300, 24, torch.float16, device, bias=False)
    names = ("log_probs", "entropy")
    leaves = case.leaves(("weight",) if weight == "frozen" else ())
    options: dict[str, Any] = {"backend": "triton"}
    if weight == "expected":
        options["expected_grads"] = {"log_probs": torch.ones(40, device=device)}
    with override(plan_frozen=CHUNKS, plan_expected=CHUNKS):
        result = call(case, leaves, names, **options)
    with torch.no_grad():
        plain = call(case, leaves, names, backend="triton")
    assert torch.equal(result.log_probs, plain.log_probs)
    assert torch.equal(result.entropy, plain.entropy)
    calls = {"trained": 2, "frozen": 4, "expected": 4}[weight]
    assert products.count("fold_product_triton") == calls


def test_plan_cuts_where_sums_are_cut() -> None:
    spans = 128
    plan = plan_products(8192, spans * SPAN_COLUMNS, 0, 32, "cuda", None)
    assert plan is not None
    assert (plan.rows, plan.columns) == (8192, spans * SPAN_COLUMNS)
    plan = plan_products(8192, spans * SPAN_COLUMNS, 0, 32, "cuda", 1024 * 32 * spans)
    assert plan is not None
    assert (plan.rows, plan.columns) == (1024, spans * SPAN_COLUMNS)
    plan = plan_products(8192, spans * SPAN_COLUMNS, 2304, 32, "cuda", 64 << 20)
    assert plan is not None
    assert plan.columns % SPAN_COLUMNS == 0
    assert plan.columns * 2304 <= 32 << 20
    for cast, scratch in ((0, 32 * spans * 15), (2304, 2 * 2304 * SPAN_COLUMNS - 1)):
        assert plan_products(8192, spans * SPAN_COLUMNS, cast, 32, "cuda", scratch) is None
