"""The gradient kernel against its plain-torch twin: same tile, same gradient of the logits."""

import inspect
import itertools

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.lm_head_gradient import (
    RowCoefficients,
    gradient_tile_torch,
    gradient_tile_triton,
)
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

TRANSFORMS = {
    "identity": TileTransform(),
    "all": TileTransform(scale=0.7, softcap=5.0, temperature=1.3),
}


def coefficients(logits: Tensor, flags: tuple[bool, bool, bool]) -> RowCoefficients:
    """Random coefficients of rows whose normalizer fits the logits."""
    rows, device = logits.shape[0], logits.device
    names = inspect.signature(RowCoefficients).parameters
    fields = {name: torch.randn(rows, device=device) for name in names}
    normalizer = logits.float().logsumexp(1)
    for name, value in (
        ("log_normalizer", normalizer),
        ("maximum", logits.float().amax(1)),
        ("log_sum", normalizer - logits.float().amax(1)),
    ):
        if name in fields:
            fields[name] = value
    for name, wanted in zip(("log_linear", "square", "constant"), flags, strict=True):
        if not wanted:
            fields[name] = None  # type: ignore[assignment]
    return RowCoefficients(**fields)


def compare(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    start: int,
    transform: TileTransform,
    out_dtype: torch.dtype,
    flags: tuple[bool, bool, bool] = (True, True, True),
) -> Tensor:
    rows = coefficients(logits, flags)
    results = []
    for gradient in (gradient_tile_triton, gradient_tile_torch):
        buffer = logits.clone()
        out = buffer if buffer.dtype == out_dtype else torch.empty_like(buffer, dtype=out_dtype)
        gradient(buffer, bias, targets, temperature, rows, start, transform, out)
        results.append(out.float())
    ours, theirs = results
    unit = torch.finfo(out_dtype).eps
    # The terms of a gradient may cancel: roundoff is relative to the largest of the tile.
    atol = 4e-6 * max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=2 * max(unit, 2e-6), atol=atol)
    return ours


def tile(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(rows, columns) * 3).to(device, dtype)


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_flags(transform: str, flags: tuple[bool, bool, bool], device: torch.device) -> None:
    targets = torch.randint(90, (5,), device=device)
    compare(tile(5, 90, torch.float32, device), None, targets, None, 0, TRANSFORMS[transform],
            torch.float32, flags)  # fmt: skip


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
     (torch.float32, torch.float16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_dtypes_bias_and_temperature(
    per_row: bool,
    bias: torch.dtype | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> None:
    targets = torch.randint(70, (5,), device=device)
    temperature = torch.rand(5, device=device) + 0.5 if per_row else None
    values = None if bias is None else torch.randn(70, device=device).to(bias)
    compare(tile(5, 70, dtypes[0], device), values, targets, temperature, 0, TRANSFORMS["all"],
            dtypes[1])  # fmt: skip


@pytest.mark.parametrize("columns", [1, 127, 128, 4095, 4096, 4097, 8193])
@pytest.mark.parametrize("start", [0, 1000])
def test_widths_around_a_block_and_targets_elsewhere(
    start: int, columns: int, device: torch.device
) -> None:
    """Targets at both ends of the tile, just before and just after it."""
    targets = torch.tensor([start, start + columns - 1, start - 1, start + columns], device=device)
    compare(tile(4, columns, torch.float32, device), None, targets, None, start,
            TRANSFORMS["identity"], torch.float32)  # fmt: skip


def test_masked_columns_get_zero(device: torch.device) -> None:
    bias = torch.randn(70, device=device)
    bias[10:40] = float("-inf")
    targets = torch.tensor([0, 69, 20, 9, 40], device=device)
    gradient = compare(tile(5, 70, torch.float32, device), bias, targets, None, 0,
                       TRANSFORMS["all"], torch.float32)  # fmt: skip
    assert (gradient[:, 10:40] == 0).all()


def test_padding_of_a_strided_tile_is_not_touched(device: torch.device) -> None:
    buffer = torch.full((5, 80), 7.0, device=device)
    buffer[:, :70] = tile(5, 70, torch.float32, device)
    view = buffer[:, :70]
    targets = torch.randint(70, (5,), device=device)
    rows = coefficients(view, (True, True, True))
    expected = view.contiguous()
    transform = TRANSFORMS["all"]
    gradient_tile_torch(expected.clone(), None, targets, None, rows, 0, transform, expected)
    gradient_tile_triton(view, None, targets, None, rows, 0, transform, view)
    torch.testing.assert_close(view, expected, rtol=4e-6, atol=2e-6)
    assert (buffer[:, 70:] == 7.0).all()
