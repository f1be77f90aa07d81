"""Make the gradient of the head's logits while these are made anew: no logits in memory.

See `hopper_products`, and `lm_head_gradient` for the gradient. The logits are those that
`lm_head_fold_product` folded, to the last bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .hopper_products import (
    AOT_TARGETS,
    BLOCK_H,
    BLOCK_N,
    BLOCK_V,
    GROUP,
    LOG2E,
    STAGES,
    WARPS,
    compiled_variant,
    descriptor,
    factor_descriptors,
    factor_types,
    grouped,
    logits_block,
    programs,
)
from .lm_head_gradient import RowCoefficients
from .logit_transform import TileTransform
from .triton_shim import jit, tl

__all__ = ["AOT_TARGETS", "AOT_VARIANTS", "gradient_product_triton"]


@jit
def lm_head_gradient_product_kernel(
    hidden,
    weight,
    out,
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
    rows,
    width,
    features,
    scale,
    temperature,
    programs,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    LOG_LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row_blocks = tl.cdiv(rows, BLOCK_N)
    column_blocks = tl.cdiv(width, BLOCK_V)
    for item in range(tl.program_id(0), row_blocks * column_blocks, programs):
        row_block, column_block = grouped(item, row_blocks, column_blocks, GROUP)
        start_n, start_v = row_block * BLOCK_N, column_block * BLOCK_V
        x = logits_block(hidden, weight, start_n, start_v, features, BLOCK_N, BLOCK_V, BLOCK_H)
        row = start_n + tl.arange(0, BLOCK_N)
        column = start_v + tl.arange(0, BLOCK_V)
        # a row behind the last has its numbers, and is not written
        known = tl.minimum(row, rows - 1)
        target = tl.load(targets_ptr + known) - start
        slope = tl.full((BLOCK_N,), scale, tl.float32)
        if ROW_TEMPERATURE:
            slope = tl.div_rn(slope, tl.load(temperature_ptr + known))
        else:
            slope = slope * tl.div_rn(1.0, temperature)
        centre = tl.load(centre_ptr + known) * LOG2E
        # Of a row's numbers everything is made one factor beforehand: with e = exp(z - centre) the
        # gradient is e (p0 + p1 log2 e) + p2 e^2 + p3, and what the target has more.
        share = tl.load(inverse_sum_ptr + known) * slope
        upstream = tl.load(target_ptr + known)
        linear = tl.load(linear_ptr + known) - upstream
        if LOG_LINEAR:
            log_linear = tl.load(log_linear_ptr + known)
            linear -= log_linear * tl.load(log_sum_ptr + known)
        if HAS_BIAS:
            added = tl.load(bias_ptr + column, mask=column < width, other=0.0)
            x += added.to(tl.float32)[None, :]
        exponent = x * (slope * LOG2E)[:, None] - centre[:, None]
        e = tl.exp2(exponent)
        if LOG_LINEAR:
            # 2^exponent is 0 below -150: the bound turns 0 * -inf into 0
            log_e = tl.maximum(exponent, -300.0)
            per_log = log_linear * share / LOG2E
            gradient = e * ((linear * share)[:, None] + log_e * per_log[:, None])
        else:
            gradient = e * (linear * share)[:, None]
        if SQUARE:
            square = tl.load(square_ptr + known) * tl.load(inverse_sum_ptr + known) * share
            gradient += e * e * square[:, None]
        if CONSTANT:
            gradient += (tl.load(constant_ptr + known) * slope)[:, None]
        hit = (target >= start_v) & (target < start_v + BLOCK_V)
        if tl.max(hit.to(tl.int32), axis=0) > 0:  # few blocks hold a target of their rows
            rest = tl.load(target_rest_ptr + known) * slope
            more = e * (upstream * share)[:, None] + rest[:, None]
            gradient += tl.where(column[None, :] == target[:, None], more, 0.0)
        if HAS_BIAS:
            gradient = tl.where(x == float("-inf"), 0.0, gradient)
        out.store([start_n, start_v], gradient.to(out.dtype))


def gradient_product_triton(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    coefficients: RowCoefficients,
    start: int,
    transform: TileTransform,
    out: Tensor,
) -> None:
    """Write the gradient of the raw logits of `hidden` [n, H] with a block of the vocabulary.

    `weight` [v, H] is the block, of hidden's dtype; the gradient goes to `out` [n, v]. `transform`
    is without a soft cap. The other arguments are those of `gradient_tile_torch`.
    """
    rows, width = out.shape
    count = programs(hidden.device, -(-rows // BLOCK_N) * -(-width // BLOCK_V))
    lm_head_gradient_product_kernel[(count,)](
        *factor_descriptors(hidden, weight),
        descriptor(out, (BLOCK_N, BLOCK_V)),
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
        rows,
        width,
        hidden.size(1),
        transform.scale,
        transform.temperature,
        count,
        HAS_BIAS=bias is not None,
        ROW_TEMPERATURE=temperature is not None,
        LOG_LINEAR=coefficients.log_linear is not None,
        SQUARE=coefficients.square is not None,
        CONSTANT=coefficients.constant is not None,
        BLOCK_N=BLOCK_N,
        BLOCK_V=BLOCK_V,
        BLOCK_H=BLOCK_H,
        GROUP=GROUP,
        LOG2E=LOG2E,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _variant(
    dtype: str, bias: str | None = None, **on: bool
) -> tuple[str, dict[str, str], Any, int]:
    names = ("ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT")
    flags = {name: on.get(name, False) for name in names}
    rows = ("centre", "inverse_sum", "log_sum", "linear", "target", "target_rest")
    types = factor_types(dtype) | {"out": f"tensordesc<{dtype}[{BLOCK_N}, {BLOCK_V}]>"}
    optional = {
        "bias_ptr": bias,
        "temperature_ptr": "fp32" if flags["ROW_TEMPERATURE"] else None,
        "log_linear_ptr": "fp32" if flags["LOG_LINEAR"] else None,
        "square_ptr": "fp32" if flags["SQUARE"] else None,
        "constant_ptr": "fp32" if flags["CONSTANT"] else None,
    }
    return compiled_variant(
        "lm_head_gradient_product_kernel",
        types | {f"{name}_ptr": "*fp32" for name in rows},
        flags | {"HAS_BIAS": bias is not None},
        optional,
    )


_EVERYTHING = dict.fromkeys(("ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT"), True)
AOT_VARIANTS = [
    _variant("bf16"),
    _variant("bf16", LOG_LINEAR=True),
    _variant("bf16", "fp32", **_EVERYTHING),
    _variant("fp16", LOG_LINEAR=True),
]
