"""Adapters on the head through Triton: tiles in memory, and Hopper's products (interpreted in
float16 here, on Hopper in all tests)."""

from typing import Any

import pytest
import torch
from lm_head_checks import make_case
from test_lm_head_hopper_path import CHUNKS
from test_lm_head_hopper_path import products as hopper_products
from test_low_rank import adapters, assert_exact, tiles

from lowpeak import LowRank, fused_lm_head
from lowpeak.kernels.lm_head_fold_product import SPAN_COLUMNS
from lowpeak.lm_head import chunk_walk, chunks
from lowpeak.lm_head.planner import override

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

__all__ = ["hopper_products"]  # a fixture


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
@pytest.mark.parametrize("frozen", [("weight", "bias"), ()], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_in_memory(
    dtype: torch.dtype,
    frozen: tuple[str, ...],
    expected: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu" or dtype == torch.float32:
        # Hopper's products, which take bfloat16 there, cut at multiples of their spans only
        monkeypatch.setattr(chunk_walk, "join_columns", lambda inputs: 50)
    case = make_case(33, 130, 24, dtype, device)
    with tiles():
        assert_exact(
            case, adapters(case, (3, 2)), frozen=frozen, expected=expected, backend="triton"
        )


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
@pytest.mark.parametrize("frozen", [("weight", "bias"), ()], ids=["frozen", "trained"])
def test_products(
    frozen: tuple[str, ...],
    expected: bool,
    device: torch.device,
    hopper_products: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a head that is wider by the adapters' ranks."""
    monkeypatch.setattr(chunk_walk, "join_columns", lambda inputs: 50)
    if device.type == "cpu":  # the kernel that sums in halves is for Hopper's memory copies alone
        monkeypatch.setattr(chunks, "half_products_serve", lambda inputs: False)
    case = make_case(33, 130, 24, torch.float16, device)
    with tiles():
        assert_exact(
            case, adapters(case, (3, 2)), frozen=frozen, expected=expected, backend="triton"
        )
    assert ("gradient_product_triton" in hopper_products) == (not expected)


def test_outputs_are_the_same_bits_with_and_without_gradients(
    device: torch.device, hopper_products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes, one pass, and a forward alone."""
    monkeypatch.setattr(chunk_walk, "join_columns", lambda inputs: SPAN_COLUMNS)
    case = make_case(40, SPAN_COLUMNS + 300, 24, torch.float16, device, bias=False)
    (adapter,) = adapters(case, (4,))
    adapter = LowRank(adapter.a.requires_grad_(), adapter.b.requires_grad_())

    def head(**options: Any) -> torch.Tensor:
        result = fused_lm_head(
            case.hidden, case.weight, case.targets, low_rank=adapter, backend="triton", **options
        )
        assert result.log_probs is not None
        return result.log_probs

    hint = {"log_probs": torch.ones(40, device=device)}
    with override(plan_expected=CHUNKS):
        found = [head(), head(expected_grads=hint)]
    with torch.no_grad():
        plain = head()
    for log_probs in found:
        assert log_probs.requires_grad
        assert torch.equal(log_probs, plain)
