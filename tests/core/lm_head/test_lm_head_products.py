"""How many products a step runs: 8 N V H plain, 6 expected, 4 with a frozen weight."""

import pytest
import torch
from lm_head_checks import OUTPUTS, Case, backward, call, make_case, upstream_for
from lm_head_counting import counted
from torch import Tensor

from lowpeak.lm_head.planner import TilePlan, override

ROWS, VOCABULARY, WIDTH = 64, 300, 24
LOG_PROBS = ("log_probs",)
CHUNKS = TilePlan(16, VOCABULARY)


def case_for(device: torch.device) -> Case:
    return make_case(ROWS, VOCABULARY, WIDTH, device=device, bias=False, ignored=0.0)


def products(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    upstream: dict[str, Tensor],
    frozen: tuple[str, ...] = (),
    **options: object,
) -> float:
    leaves = case.leaves(frozen)
    with (
        override(plan_frozen=CHUNKS, plan_expected=CHUNKS),
        counted(monkeypatch, ROWS * VOCABULARY * WIDTH) as found,
    ):
        backward(call(case, leaves, OUTPUTS, **options), upstream)
    return found.nvh


@pytest.mark.parametrize(
    ("frozen", "plain", "expected"), [((), 8, 6), (("weight",), 4, 4), (("hidden",), 6, 4)]
)
def test_products_of_a_step(
    frozen: tuple[str, ...],
    plain: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    case = case_for(device)
    upstream = upstream_for(case, LOG_PROBS)
    assert products(monkeypatch, case, upstream, frozen) == plain
    assert products(monkeypatch, case, upstream, frozen, expected_grads=upstream) == expected


def test_frozen_weight_with_gradients_of_log_normalizer(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """One product gives both gradients of hidden, that of mean_logits is of rank one."""
    case = case_for(device)
    upstream = upstream_for(case, ("log_probs", "log_normalizer"))
    assert products(monkeypatch, case, upstream, ("weight",)) == 4
    with_mean = upstream_for(case, ("log_probs", "mean_logits"))
    assert products(monkeypatch, case, with_mean, ("weight",)) == 4 + 2 / ROWS


def test_frozen_weight_with_gradients_of_entropy(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """They need a recompute: 4 more, or 6 in all once it is known. Expected, they cost nothing."""
    case = case_for(device)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    found = [products(monkeypatch, case, upstream, ("weight",)) for _ in range(4)]
    assert found == [8, 8, 8, 6]
    options = {"expected_grads": upstream}
    assert products(monkeypatch, case, upstream, ("weight",), **options) == 4


def test_nothing_is_made_without_grad_mode(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = case_for(device)
    upstream = upstream_for(case, LOG_PROBS)
    with torch.no_grad():
        for options in ({}, {"expected_grads": upstream}):
            assert products(monkeypatch, case, {}, ("weight",), **options) == 2


@pytest.mark.parametrize(("frozen", "gradients"), [((), 4), (("weight",), 2)])
def test_rows_without_an_expected_gradient(
    frozen: tuple[str, ...],
    gradients: int,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Three of four rows are exactly zero: all rows have outputs, a quarter has products."""
    case = case_for(device)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    for value in upstream.values():
        value[torch.arange(ROWS, device=device) % 4 != 0] = 0
    options = {"expected_grads": upstream}
    assert products(monkeypatch, case, upstream, frozen, **options) == 2 + gradients / 4


def test_rows_without_an_upstream_gradient(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The plain backward leaves them out too, but where it must not read on the host."""
    case = case_for(device)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    for value in upstream.values():
        value[torch.arange(ROWS, device=device) % 4 != 0] = 0
    assert products(monkeypatch, case, upstream) == 2 + 6 / 4
    assert products(monkeypatch, case, upstream, row_selection="all") == 8
    nothing = {name: torch.zeros_like(value) for name, value in upstream.items()}
    assert products(monkeypatch, case, nothing) == 2


def test_a_wrong_expectation_costs_a_recompute_three_times(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = case_for(device)
    upstream = upstream_for(case, LOG_PROBS)
    wrong = {"expected_grads": {"log_probs": upstream["log_probs"].square() + 1}}
    found = [products(monkeypatch, case, upstream, **wrong) for _ in range(4)]
    assert found == [12, 12, 12, 8]


@pytest.mark.parametrize("frozen", [(), ("weight",)])
def test_scratch_too_small_for_a_chunk_takes_two_passes(
    frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = case_for(device)
    upstream = upstream_for(case, LOG_PROBS)
    leaves = case.leaves(frozen)
    # A chunk of 16 rows takes 26 bytes a logit in torch; tiles of 128 columns find room.
    options = {"scratch_bytes": 16 * 26 * 256, "backend": "torch", "expected_grads": upstream}
    with counted(monkeypatch, ROWS * VOCABULARY * WIDTH) as found:
        backward(call(case, leaves, LOG_PROBS, **options), upstream)
    assert found.nvh == (6 if frozen else 8)
