"""Turn a tile of raw logits into the gradient of the loss in those logits, in place.

With p = softmax(z), every output's gradient in z_j is one polynomial in p_j and log p_j,

    dz_j = p_j (a + b log p_j) + c p_j^2 + d + g ([j = target] - p_j),

whose row coefficients a, b, c, d, g follow from the upstream gradients (`RowCoefficients`). The
target's g (1 - p) comes in ready made, from expm1 of the log-probability: float32(1 - p) is 0 where
p rounds to 1. The chain rule of the logit transform then gives the gradient of the raw logits.

A tile may hold exponentials (`lm_head_exponentials`) in place of logits; their transform has no
soft cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .logit_transform import (
    TileTransform,
    slope_block,
    transform_block,
    transform_slope_torch,
    transform_tile_torch,
)
from .triton_shim import jit, tl


@dataclass(frozen=True)
class GradientLaunch:
    """How many columns of a row one program turns."""

    block: int = 2048
    warps: int = 4


_LAUNCH = GradientLaunch()


@dataclass(frozen=True)
class RowCoefficients:
    """Coefficients of a row's gradient, each [N] in the statistics' dtype; None is zero."""

    centre: Tensor  # the row's largest logit
    inverse_sum: Tensor  # 1 / sum_j exp(z_j - centre)
    log_sum: Tensor  # log sum_j exp(z_j - centre)
    linear: Tensor  # a
    target: Tensor  # g: upstream gradient of log_probs
    target_rest: Tensor  # g (1 - p[target])
    log_linear: Tensor | None  # b: minus the upstream gradient of entropy
    square: Tensor | None  # c: 2 * upstream gradient of log_sum_sq_probs / sum_j p_j^2
    constant: Tensor | None  # d: upstream gradient of mean_logits / V

    def rows(self, start: int, end: int) -> RowCoefficients:
        """Views of rows [start, end)."""
        return RowCoefficients(
            centre=self.centre[start:end],
            inverse_sum=self.inverse_sum[start:end],
            log_sum=self.log_sum[start:end],
            linear=self.linear[start:end],
            target=self.target[start:end],
            target_rest=self.target_rest[start:end],
            log_linear=_slice(self.log_linear, start, end),
            square=_slice(self.square, start, end),
            constant=_slice(self.constant, start, end),
        )


def _slice(x: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if x is None else x[start:end]


def gradient_tile_torch(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    coefficients: RowCoefficients,
    start: int,
    transform: TileTransform,
    out: Tensor,
    exponentials: bool = False,
) -> None:
    """Write the gradient of the raw [n, v] logits `tile` into `out`, which may be `tile` itself.

    `bias` is the tile's [v] slice, `targets` [n] int64, `temperature` [n]; `start` is the tile's
    first vocabulary column. `exponentials`: the tile holds exp(z - centre). Destroys the tile.
    """
    dtype = coefficients.centre.dtype
    if exponentials:
        z = tile.to(dtype).log().add_(coefficients.centre.unsqueeze(1))
    else:
        z = transform_tile_torch(tile, bias, temperature, transform, dtype)
    width = z.size(1)
    slope = transform_slope_torch(z, temperature, transform)
    masked = None
    if bias is not None:
        masked = (bias == -float("inf")).expand_as(z) if exponentials else z == -float("inf")
    z.sub_(coefficients.centre.unsqueeze(1))
    inside = ((targets >= start) & (targets < start + width)).unsqueeze(1)
    position = (targets - start).clamp(0, width - 1).unsqueeze(1)

    p = z.exp().mul_(coefficients.inverse_sum.unsqueeze(1))
    gradient = p * coefficients.linear.unsqueeze(1)
    if coefficients.log_linear is not None:
        log_p = z.sub_(coefficients.log_sum.unsqueeze(1))
        entropy_part = log_p.mul_(p).masked_fill_(p == 0, 0.0)
        gradient.addcmul_(entropy_part, coefficients.log_linear.unsqueeze(1))
    if coefficients.square is not None:
        gradient.addcmul_(p.square(), coefficients.square.unsqueeze(1))
    if coefficients.constant is not None:
        gradient.add_(coefficients.constant.unsqueeze(1))
    p.mul_(coefficients.target.unsqueeze(1)).neg_()
    rest = coefficients.target_rest.unsqueeze(1)
    p.scatter_(1, position, torch.where(inside, rest, p.gather(1, position)))
    gradient.add_(p)
    if slope is not None:
        gradient.mul_(slope)
    if masked is not None:
        gradient.masked_fill_(masked, 0.0)
    out.copy_(gradient)


@jit
def lm_head_gradient_kernel(
    tile_ptr,
    row_stride,
    out_ptr,
    out_stride,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    centre_ptr,
    inverse_sum_ptr,
    log_sum_ptr,
    linear_ptr,
    target_ptr,
    target_rest_ptr,
    log_linear_ptr,
    square_ptr,
    constant_ptr,
    start,
    width,
    scale,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    LOG_LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    EXPONENTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    target = tl.load(targets_ptr + row) - start
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)

    x = tl.load(tile_ptr + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    masked = columns < 0
    if HAS_BIAS:
        added = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        masked = added == float("-inf")
    if EXPONENTIALS:
        p = x * tl.load(inverse_sum_ptr + row)
        if LOG_LINEAR:
            centred = tl.log(x)
    else:
        if HAS_BIAS:
            x += added
        z = transform_block(x, scale, softcap, temperature, HAS_BIAS, HAS_SOFTCAP)
        masked = z == float("-inf")
        centred = z - tl.load(centre_ptr + row)
        p = tl.exp(centred) * tl.load(inverse_sum_ptr + row)
    polynomial = tl.load(linear_ptr + row)
    if LOG_LINEAR:
        log_linear = tl.load(log_linear_ptr + row)
        log_p = centred - tl.load(log_sum_ptr + row)
        polynomial = tl.where(p == 0, 0.0, polynomial + log_linear * log_p)
    gradient = p * polynomial
    if SQUARE:
        gradient += tl.load(square_ptr + row) * p * p
    if CONSTANT:
        gradient += tl.load(constant_ptr + row)
    rest = tl.load(target_rest_ptr + row)
    gradient += tl.where(columns == target, rest, -p * tl.load(target_ptr + row))
    gradient *= slope_block(x, scale, softcap, temperature, HAS_SOFTCAP)
    if HAS_BIAS:
        gradient = tl.where(masked, 0.0, gradient)
    out = out_ptr + row * out_stride + columns
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=inside)


def gradient_tile_triton(
    tile: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    coefficients: RowCoefficients,
    start: int,
    transform: TileTransform,
    out: Tensor,
    exponentials: bool = False,
    launch: GradientLaunch = _LAUNCH,
) -> None:
    """`gradient_tile_torch` as one kernel launch; coefficients must be float32."""
    grid = (tile.size(0), -(-tile.size(1) // launch.block))
    lm_head_gradient_kernel[grid](
        tile,
        tile.stride(0),
        out,
        out.stride(0),
        bias,
        targets,
        temperature,
        coefficients.centre,
        coefficients.inverse_sum,
        coefficients.log_sum,
        coefficients.linear,
        coefficients.target,
        coefficients.target_rest,
        coefficients.log_linear,
        coefficients.square,
        coefficients.constant,
        start,
        tile.size(1),
        transform.scale,
        transform.softcap,
        transform.temperature,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=transform.softcap != 0.0,
        ROW_TEMPERATURE=temperature is not None,
        LOG_LINEAR=coefficients.log_linear is not None,
        SQUARE=coefficients.square is not None,
        CONSTANT=coefficients.constant is not None,
        EXPONENTIALS=exponentials,
        BLOCK=launch.block,
        num_warps=launch.warps,
    )


def _variant(
    tile: str, out: str, bias: str | None = None, **on: bool
) -> tuple[str, dict[str, str], Any, int]:
    terms = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT")
    flags = (*terms, "EXPONENTIALS")
    constants: dict[str, object] = {flag: on.get(flag, False) for flag in flags}
    constants |= {"HAS_BIAS": bias is not None, "BLOCK": _LAUNCH.block}
    types = {"tile_ptr": f"*{tile}", "out_ptr": f"*{out}", "targets_ptr": "*i64"}
    rows = ("centre", "inverse_sum", "log_sum", "linear", "target", "target_rest")
    types |= {f"{name}_ptr": "*fp32" for name in rows}
    types |= dict.fromkeys(("row_stride", "out_stride", "start", "width"), "i32")
    types |= dict.fromkeys(("scale", "softcap", "temperature"), "fp32")
    optional = {
        "bias_ptr": bias,
        "temperature_ptr": "fp32" if constants["ROW_TEMPERATURE"] else None,
        "log_linear_ptr": "fp32" if constants["LOG_LINEAR"] else None,
        "square_ptr": "fp32" if constants["SQUARE"] else None,
        "constant_ptr": "fp32" if constants["CONSTANT"] else None,
    }
    for pointer, kind in optional.items():
        if kind is None:
            constants[pointer] = None
        else:
            types[pointer] = f"*{kind}"
    return ("lm_head_gradient_kernel", types, constants, _LAUNCH.warps)


_TERMS = dict.fromkeys(("ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT"), True)
_EVERYTHING = {**_TERMS, "HAS_SOFTCAP": True}
# float16 products: float32 tiles of logits, float16 tiles of gradients
AOT_VARIANTS = [
    _variant("bf16", "bf16"),
    _variant("bf16", "bf16", LOG_LINEAR=True),
    _variant("bf16", "bf16", HAS_SOFTCAP=True),
    _variant("bf16", "bf16", "bf16", **_EVERYTHING),
    _variant("bf16", "bf16", "fp32", LOG_LINEAR=True),
    _variant("bf16", "bf16", EXPONENTIALS=True),
    _variant("bf16", "bf16", "bf16", EXPONENTIALS=True, **_TERMS),
    _variant("fp32", "fp32"),
    _variant("fp32", "fp32", "fp32", **_EVERYTHING),
    _variant("fp32", "fp16"),
    _variant("fp32", "fp16", "fp16", **_EVERYTHING),
]
