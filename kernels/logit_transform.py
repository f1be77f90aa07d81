"""What becomes of a raw logit: z = softcap * tanh(scale * (x + bias) / softcap) / temperature.

A raw logit of -inf (a masked token) stays -inf after the cap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .triton_shim import jit, tl


@dataclass(frozen=True)
class TileTransform:
    """The transform's constants; `softcap=0.0` is no cap, `temperature` serves all rows alike."""

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0


def transform_tile_torch(
    tile: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    transform: TileTransform,
    dtype: torch.dtype,
) -> Tensor:
    """z of a raw [n, v] tile in `dtype`, written into `tile` itself where the dtypes agree.

    `bias` is the [v] slice of the tile, `temperature` [n] replaces the transform's own.
    """
    z = tile.to(dtype)
    if bias is not None:
        z.add_(bias.to(dtype))
    distorts = transform.softcap != 0.0 or transform.scale <= 0.0
    masked = z == -float("inf") if distorts and bias is not None else None
    if transform.scale != 1.0:
        z.mul_(transform.scale)
    if transform.softcap:
        z.div_(transform.softcap).tanh_().mul_(transform.softcap)
    if masked is not None:
        z.masked_fill_(masked, -float("inf"))
    if temperature is not None:
        z.div_(temperature.to(dtype).unsqueeze(1))
    elif transform.temperature != 1.0:
        z.div_(transform.temperature)
    return z


def transform_slope_torch(
    z: Tensor, temperature: Tensor | None, transform: TileTransform
) -> Tensor | None:
    """dz / dx at z: [n, v] with a cap, [n, 1] with a temperature per row, None where it is 1."""
    per_row = None if temperature is None else temperature.to(z.dtype).unsqueeze(1)
    divisor = transform.temperature if per_row is None else per_row
    if transform.softcap:
        tanh = z * (divisor / transform.softcap)
        return tanh.square_().neg_().add_(1.0).mul_(transform.scale / divisor)
    if per_row is not None:
        return transform.scale / per_row
    if transform.scale == transform.temperature:
        return None
    return torch.full(
        (1, 1), transform.scale / transform.temperature, dtype=z.dtype, device=z.device
    )


@jit
def _tanh(a):
    # Both forms add a small correction to an exact number, a or 1, so that one rounding counts.
    # Below 1 it is Lambert's continued fraction, off by 2e-12; above 1, 2 t / (1 + t). Triton's own
    # division is off by 2 units in the last place.
    square = a * a
    numerator = square * (45045.0 + square * (2772.0 + square * 27.0))
    denominator = 135135.0 + square * (62370.0 + square * (3150.0 + square * 28.0))
    t = tl.exp(-2.0 * tl.abs(a))
    saturating = 1.0 - tl.div_rn(2.0 * t, 1.0 + t)
    return tl.where(
        tl.abs(a) < 1.0,
        a - a * tl.div_rn(numerator, denominator),
        tl.where(a < 0, -saturating, saturating),
    )


@jit
def transform_block(
    x, scale, softcap, temperature, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """z of a block x of raw float32 logits (bias added already)."""
    if HAS_SOFTCAP:
        # Factors rounded beforehand would shift all logits the same way: an error that adds up over
        # the rows of a gradient, where those of single logits cancel.
        z = tl.div_rn(_tanh(tl.div_rn(x * scale, softcap)) * softcap, temperature)
    else:
        z = x * (scale * tl.div_rn(1.0, temperature))
    if HAS_BIAS:
        # only a bias masks tokens; the cap or a scale <= 0 would turn -inf into something else
        z = tl.where(x == float("-inf"), float("-inf"), z)
    return z


@jit
def slope_block(x, scale, softcap, temperature, HAS_SOFTCAP: tl.constexpr):
    """dz / dx of a block x of raw float32 logits.

    1 - tanh(a)^2 = 4 t / (1 + t)^2 with t = exp(-2|a|) keeps its digits where the cap saturates.
    """
    slope = scale * tl.div_rn(1.0, temperature)
    if HAS_SOFTCAP:
        t = tl.exp(-2.0 * tl.abs(x * (scale / softcap)))
        slope = slope * (4.0 * t / ((1.0 + t) * (1.0 + t)))
    return slope
