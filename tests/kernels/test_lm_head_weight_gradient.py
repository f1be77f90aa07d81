"""The weight gradient summed in halves: kernel, torch twin and a plain float32 sum are one."""

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.lm_head_weight_gradient import (
    TargetRows,
    accumulate_halves_torch,
    accumulate_halves_triton,
)

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

VOCABULARY, WIDTH, TOKENS = 300, 136, 70


def chunks(dtype: torch.dtype, device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tiles whose rows are longer than the vocabulary, with the hidden states beside them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        tile = torch.randn(TOKENS, VOCABULARY + 4, generator=generator).to(device, dtype)
        hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(device, dtype)
        made.append((tile[:, :VOCABULARY], hidden))
    return made


def accumulated(accumulate: object, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    assert callable(accumulate)
    tile, hidden = parts[0]
    result = torch.empty(VOCABULARY, WIDTH, dtype=tile.dtype, device=tile.device)
    lower = torch.empty(VOCABULARY, WIDTH, dtype=torch.int16, device=tile.device)
    for index, (tile, hidden) in enumerate(parts):
        last = index == len(parts) - 1
        accumulate(tile, hidden, result, lower, index == 0, last)
    return result


def wanted(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum((tile.double().t() @ hidden.double() for tile, hidden in parts), torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twin_loses_no_bit_of_a_float32_sum(dtype: torch.dtype, device: torch.device) -> None:
    parts = chunks(dtype, device, 4)
    total = torch.zeros(VOCABULARY, WIDTH, device=device)
    for tile, hidden in parts:
        total += tile.t().float() @ hidden.float()
    assert torch.equal(accumulated(accumulate_halves_torch, parts), total.to(dtype))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_kernel_rounds_the_sum_once(count: int, device: torch.device) -> None:
    parts = chunks(torch.float16, device, count)
    found = accumulated(accumulate_halves_triton, parts)
    exact = wanted(parts)
    # half a unit in the last place of each number, and float32's error of a sum near zero
    bound = exact.abs() * torch.finfo(torch.float16).eps / 2 * 1.01 + 1e-4
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.cuda  # Triton's interpreter multiplies the bits of bfloat16 as integers
@pytest.mark.parametrize("count", [1, 2, 5])
def test_kernel_rounds_a_bfloat16_sum_once(count: int, device: torch.device) -> None:
    parts = chunks(torch.bfloat16, device, count)
    exact = wanted(parts)
    bound = exact.abs() * torch.finfo(torch.bfloat16).eps / 2 * 1.01 + 1e-4
    found = accumulated(accumulate_halves_triton, parts)
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("accumulate", [accumulate_halves_torch, accumulate_halves_triton])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_targets_are_added_before_the_sum_is_rounded(
    accumulate: object, count: int, device: torch.device
) -> None:
    """A target of many rows, of one, of none; of a single chunk nothing is read from `lower`."""
    assert callable(accumulate)
    parts = chunks(torch.float16, device, count)
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::3], targets[1] = 17, VOCABULARY - 1
    rest = torch.randn(TOKENS, generator=generator).to(device)
    targets = targets.to(device)
    onehot = torch.zeros(TOKENS, VOCABULARY, dtype=torch.float64, device=device)
    onehot.scatter_(1, targets.unsqueeze(1), rest.double().unsqueeze(1))
    exact = wanted(parts) + sum(onehot.t() @ hidden.double() for _, hidden in parts)
    result = torch.empty(VOCABULARY, WIDTH, dtype=torch.float16, device=device)
    lower = torch.empty(result.shape if count > 1 else (0,), dtype=torch.int16, device=device)
    for index, (tile, hidden) in enumerate(parts):
        more = TargetRows.of(targets, rest, hidden, VOCABULARY)
        accumulate(tile, hidden, result, lower, index == 0, index == count - 1, more)
    bound = exact.abs() * torch.finfo(torch.float16).eps / 2 * 1.01 + 1e-4
    assert ((result.double() - exact).abs() <= bound).all()
