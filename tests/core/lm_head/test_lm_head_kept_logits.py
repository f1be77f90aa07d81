"""An explicit scratch_bytes above the default holds some rows' logits for the backward."""

from dataclasses import replace

import pytest
import torch
from lm_head_checks import (
    ALL_TRANSFORMS,
    OUTPUTS,
    assert_exact,
    backward,
    call,
    error,
    largest,
    upstream_for,
)
from lm_head_checks import make_case as any_case
from lm_head_counting import counted
from lm_head_memory import measure
from lm_head_tolerances import ALL_DTYPES
from torch import Tensor

from lowpeak.lm_head import planner

ROWS, VOCABULARY, WIDTH = 64, 300, 24
PITCH = 304


@pytest.fixture(autouse=True)
def _small_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default of 1 MiB, so that little more keeps something."""
    small = replace(planner.budgets("cpu"), tiles=1 << 20)
    monkeypatch.setattr(planner, "budgets", lambda device_type: small)


def make_case(dtype: torch.dtype, device: torch.device, **options: object):  # type: ignore[no-untyped-def]
    return any_case(ROWS, VOCABULARY, WIDTH, dtype, device, ignored=0.0, **options)


def scratch_for(rows: int, itemsize: int) -> int:
    return (1 << 20) + rows * PITCH * itemsize


@pytest.mark.parametrize("kept", [1, 16, 40, 64, 1000])
@pytest.mark.parametrize("frozen", [(), ("hidden",), ("bias",)], ids=str)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_gradients(
    dtype: torch.dtype, frozen: tuple[str, ...], kept: int, device: torch.device
) -> None:
    case = make_case(dtype, device, transform=ALL_TRANSFORMS["all"])
    scratch = scratch_for(kept, 8)
    for row_selection in ("valid", "all"):
        options = {"scratch_bytes": scratch, "row_selection": row_selection}
        assert_exact(case, OUTPUTS, frozen=frozen, **options)


@pytest.mark.parametrize("kept", [0, 16, 64])
def test_products(kept: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """8 - 2 f of N V H for a fraction f of the rows; twice from one graph, with the same bits."""
    case = make_case(torch.float32, device, bias=False)
    leaves, upstream = case.leaves(), upstream_for(case)
    with counted(monkeypatch, ROWS * VOCABULARY * WIDTH) as found:
        result = call(case, leaves, OUTPUTS, scratch_bytes=scratch_for(kept, 4))
        backward(result, upstream, retain_graph=True)
    assert found.nvh == 8 - 2 * kept / ROWS
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    backward(result, upstream)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * once[name]), name


@pytest.mark.parametrize(("every", "products"), [(4, 2 + 6 / 4), (64, 2 + 6 / 64)])
def test_rows_without_a_gradient_leave_first(
    every: int, products: float, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Where leaving them out saves more than the kept logits do."""
    case = make_case(torch.float32, device, bias=False)
    upstream = upstream_for(case, ("log_probs",))
    upstream["log_probs"][torch.arange(ROWS, device=device) % every != 0] = 0
    with counted(monkeypatch, ROWS * VOCABULARY * WIDTH) as found:
        leaves = case.leaves()
        backward(call(case, leaves, ("log_probs",), scratch_bytes=scratch_for(32, 4)), upstream)
    assert found.nvh == products


def test_one_row_without_a_gradient_does_not_give_up_the_logits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    case = make_case(torch.float32, device, bias=False)
    upstream = upstream_for(case, ("log_probs",))
    upstream["log_probs"][5] = 0
    with counted(monkeypatch, ROWS * VOCABULARY * WIDTH) as found:
        ours = assert_exact(case, upstream=upstream, scratch_bytes=scratch_for(32, 4))
    assert found.nvh == 8 - 1
    plain = assert_exact(case, upstream=upstream).gradients
    for name in ("hidden", "weight"):
        gradient: Tensor = plain[name]
        assert error(ours.gradients[name], gradient) <= 1e-6 * largest(gradient), name


def test_memory_stays_within_the_scratch() -> None:
    case = any_case(256, 4096, 128, torch.bfloat16, ignored=0.0, bias=False)
    leaves, upstream = case.leaves(), upstream_for(case, ("log_probs",))
    scratch = (1 << 20) + 128 * 4096 * 2

    def step() -> object:
        result = call(case, leaves, ("log_probs",), scratch_bytes=scratch)
        values = [result.log_probs]
        return torch.autograd.grad(values, list(leaves.values()), list(upstream.values()))

    found = measure(step, torch.device("cpu")).peak
    gradients = 2 * case.weight.numel() + 6 * case.hidden.numel()
    assert found <= scratch + gradients + 400 * 256 + 16 * 4096 + (64 << 10)
