"""The fold kernel against its plain-torch twin: same tile, same statistics."""

import itertools

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.lm_head_fold import Folded, RowStatistics, fold_tile_torch, fold_tile_triton
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

TRANSFORMS = {
    "identity": TileTransform(),
    "all": TileTransform(scale=0.7, softcap=5.0, temperature=1.3),
}
FLAGS = [Folded(*flags) for flags in itertools.product([False, True], repeat=4)]


def tile(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tile whose rows are strided and whose padding holds NaN, which must never be read."""
    buffer = torch.full((rows, columns + 5), float("nan"))
    buffer[:, :columns] = torch.randn(rows, columns) * 3
    return buffer.to(device, dtype)[:, :columns]


def assert_equal_statistics(ours: RowStatistics, theirs: RowStatistics) -> None:
    for name, value in vars(ours).items():
        torch.testing.assert_close(value, getattr(theirs, name), rtol=2e-6, atol=2e-5, msg=name)


def fold_both(
    tiles: list[tuple[Tensor, Tensor | None]],
    targets: Tensor,
    temperature: Tensor | None,
    transform: TileTransform,
    folded: Folded,
) -> None:
    """Fold the tiles in order with both, comparing after each."""
    rows, device = targets.numel(), targets.device
    ours = RowStatistics.empty(rows, folded, torch.float32, device)
    theirs = RowStatistics.empty(rows, folded, torch.float32, device)
    start = 0
    for logits, bias in tiles:
        arguments = (bias, targets, temperature)
        fold_tile_triton(logits.clone(), *arguments, ours, start, transform, folded)
        fold_tile_torch(logits.clone(), *arguments, theirs, start, transform, folded)
        assert_equal_statistics(ours, theirs)
        start += logits.shape[1]


@pytest.mark.parametrize("folded", FLAGS, ids=str)
def test_flags(folded: Folded, device: torch.device) -> None:
    targets = torch.randint(90, (5,), device=device)
    tiles = [(tile(5, columns, torch.float32, device), None) for columns in (33, 1, 56)]
    fold_both(tiles, targets, None, TRANSFORMS["identity"], folded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_dtypes_bias_and_temperature(
    transform: str,
    per_row: bool,
    bias: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    targets = torch.randint(70, (5,), device=device)
    temperature = torch.rand(5, device=device) + 0.5 if per_row else None
    tiles = []
    for columns in (64, 6):
        values = None if bias is None else torch.randn(columns, device=device).to(bias)
        tiles.append((tile(5, columns, dtype, device), values))
    fold_both(tiles, targets, temperature, TRANSFORMS[transform], Folded(True, True, True, True))


@pytest.mark.parametrize("columns", [1, 127, 128, 4095, 4096, 4097, 8193])
def test_widths_around_a_block(columns: int, device: torch.device) -> None:
    targets = torch.tensor([0, columns - 1, columns // 2], device=device)
    tiles = [(tile(3, columns, torch.float32, device), None)]
    fold_both(tiles, targets, None, TRANSFORMS["identity"], Folded(True, True, True, True))


@pytest.mark.parametrize("masked", [slice(0, 20), slice(0, 64), slice(50, 70)], ids=str)
def test_masked_columns(masked: slice, device: torch.device) -> None:
    """-inf on part of a tile, on the whole first tile, and across two tiles."""
    bias = torch.randn(70, device=device)
    bias[masked] = float("-inf")
    targets = torch.tensor([65, 69, 1, 55, 30], device=device)
    tiles = [
        (tile(5, 64, torch.float32, device), bias[:64]),
        (tile(5, 6, torch.float32, device), bias[64:]),
    ]
    fold_both(tiles, targets, None, TRANSFORMS["all"], Folded(True, True, False, True))


def test_rows_are_views_of_a_larger_state(device: torch.device) -> None:
    """Folding rows 2..5 of 8 leaves the others as they were."""
    folded = Folded(True, True, True, True)
    state = RowStatistics.empty(8, folded, torch.float32, device)
    untouched = RowStatistics.empty(8, folded, torch.float32, device)
    targets = torch.randint(40, (3,), device=device)
    logits = tile(3, 40, torch.float32, device)
    fold_tile_triton(
        logits, None, targets, None, state.rows(2, 5), 0, TRANSFORMS["identity"], folded
    )
    for name, value in vars(state).items():
        before = getattr(untouched, name)
        assert torch.equal(value[:2], before[:2]), name
        assert torch.equal(value[5:], before[5:]), name
        assert not torch.equal(value[2:5], before[2:5]) or name == "maximum_before", name
