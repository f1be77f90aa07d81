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
    STAGES,
    WARPS,
    compiled_variant,
    factor_descriptors,
    factor_types,
    programs,
)
from .lm_head_gradient import RowCoefficients, gradient_block
from .logit_transform import TileTransform
from .triton_shim import jit, tl

__all__ = ["AOT_TARGETS", "AOT_VARIANTS", "gradient_product_triton"]


@jit
def lm_head_gradient_product_kernel(
    hidden,
    weight,
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
    rows,
    width,
    features,
    scale,
    softcap,
    temperature,
    programs,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    LOG_LINEAR: tl.constexpr,
    SQUARE: tl.constexpr,
    CONSTANT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_blocks = tl.cdiv(rows, BLOCK_N)
    column_blocks = tl.cdiv(width, BLOCK_V)
    for item in range(tl.program_id(0), row_blocks * column_blocks, programs):
        first_row_block = item // (GROUP * column_blocks) * GROUP
        group = min(row_blocks - first_row_block, GROUP)
        within = item % (GROUP * column_blocks)
        start_n = (first_row_block + within % group) * BLOCK_N
        start_v = within // group * BLOCK_V
        x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for start_h in range(0, features, BLOCK_H):
            # what lies outside of the tensors is read as zero
            block = weight.load([start_v, start_h])
            x = tl.dot(hidden.load([start_n, start_h]), block.T, x)
        row = start_n + tl.arange(0, BLOCK_N)
        column = start_v + tl.arange(0, BLOCK_V)
        inside = column < width
        # a row behind the last has its numbers, and is not written
        known = tl.minimum(row, rows - 1)
        target = tl.load(targets_ptr + known) - start
        if ROW_TEMPERATURE:
            temperature_row = tl.load(temperature_ptr + known)
            inverse_temperature = tl.div_rn(tl.full((BLOCK_N,), 1.0, tl.float32), temperature_row)
            inverse_temperature = inverse_temperature[:, None]
        else:
            inverse_temperature = tl.div_rn(1.0, temperature)
        if HAS_BIAS:
            x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        gradient = gradient_block(
            x,
            column[None, :] == target[:, None],
            known[:, None],
            centre_ptr,
            inverse_sum_ptr,
            log_sum_ptr,
            linear_ptr,
            target_ptr,
            target_rest_ptr,
            log_linear_ptr,
            square_ptr,
            constant_ptr,
            scale,
            softcap,
            inverse_temperature,
            HAS_BIAS,
            HAS_SOFTCAP,
            LOG_LINEAR,
            SQUARE,
            CONSTANT,
        )
        where = row[:, None].to(tl.int64) * out_stride + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        tl.store(out_ptr + where, gradient.to(out_ptr.dtype.element_ty), mask=mask)


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

    `weight` [v, H] is the block, of hidden's dtype; the gradient goes to `out` [n, v]. The other
    arguments are those of `gradient_tile_torch`.
    """
    rows, width = out.shape
    count = programs(hidden.device, -(-rows // BLOCK_N) * -(-width // BLOCK_V))
    lm_head_gradient_product_kernel[(count,)](
        *factor_descriptors(hidden, weight),
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
        rows,
        width,
        hidden.size(1),
        transform.scale,
        transform.softcap,
        transform.temperature,
        count,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=transform.softcap != 0.0,
        ROW_TEMPERATURE=temperature is not None,
        LOG_LINEAR=coefficients.log_linear is not None,
        SQUARE=coefficients.square is not None,
        CONSTANT=coefficients.constant is not None,
        BLOCK_N=BLOCK_N,
        BLOCK_V=BLOCK_V,
        BLOCK_H=BLOCK_H,
        GROUP=GROUP,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _variant(
    dtype: str, bias: str | None = None, **on: bool
) -> tuple[str, dict[str, str], Any, int]:
    names = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT")
    flags = {name: on.get(name, False) for name in names}
    rows = ("centre", "inverse_sum", "log_sum", "linear", "target", "target_rest")
    types = factor_types(dtype) | {"out_stride": "i32", "out_ptr": f"*{dtype}"}
    return compiled_variant(
        "lm_head_gradient_product_kernel",
        types | {f"{name}_ptr": "*fp32" for name in rows},
        flags | {"HAS_BIAS": bias is not None},
        {
            "bias_ptr": bias,
            "temperature_ptr": "fp32" if flags["ROW_TEMPERATURE"] else None,
            "log_linear_ptr": "fp32" if flags["LOG_LINEAR"] else None,
            "square_ptr": "fp32" if flags["SQUARE"] else None,
            "constant_ptr": "fp32" if flags["CONSTANT"] else None,
        },
        BLOCK_N=BLOCK_N,
        BLOCK_V=BLOCK_V,
        BLOCK_H=BLOCK_H,
        GROUP=GROUP,
    )


_EVERYTHING = dict.fromkeys(
    ("HAS_SOFTCAP", "ROW_TEMPERATURE", "LOG_LINEAR", "SQUARE", "CONSTANT"), True
)
AOT_VARIANTS = [
    _variant("bf16"),
    _variant("bf16", HAS_SOFTCAP=True),
    _variant("bf16", "fp32", **_EVERYTHING),
    _variant("fp16", LOG_LINEAR=True),
]
