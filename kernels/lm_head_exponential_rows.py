"""What belongs to a row of kept exponentials: a guess of its unit, and the factors of its gradient.

See `lm_head_exponentials`. The guess is the target's logit and 20.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .logit_transform import TileTransform
from .triton_shim import jit, tl

# c lies this far above the target's logit, since a likely token lies above it rather than below.
MARGIN = 20.0
_CHUNK, _FEATURES, _WARPS = 256, 1024, 4


def guess_units_torch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    transform: TileTransform,
) -> Tensor:
    """c of each row [n], float32: the target's logit and MARGIN; MARGIN where it is not finite."""
    x = (hidden.float() * weight.index_select(0, targets).float()).sum(1)
    if bias is not None:
        x += bias[targets]
    x = x * transform.scale / (transform.temperature if temperature is None else temperature)
    return x.nan_to_num(0.0, 0.0, 0.0) + MARGIN


@jit
def lm_head_unit_kernel(
    hidden_ptr,
    hidden_stride,
    weight_ptr,
    weight_stride,
    bias_ptr,
    targets_ptr,
    temperature_ptr,
    unit_ptr,
    features,
    scale,
    temperature,
    margin,
    HAS_BIAS: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, features, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + row * hidden_stride + column, mask=column < features, other=0.0)
        y = tl.load(weight_ptr + target * weight_stride + column, mask=column < features, other=0.0)
        total += x.to(tl.float32) * y.to(tl.float32)
    logit = tl.sum(total)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + target).to(tl.float32)
    if ROW_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    logit = logit * tl.div_rn(scale, temperature)
    finite = tl.abs(logit) < float("inf")
    tl.store(unit_ptr + row, tl.where(finite, logit, 0.0) + margin)


def guess_units_triton(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    transform: TileTransform,
) -> Tensor:
    """`guess_units_torch` as one kernel launch."""
    unit = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
    lm_head_unit_kernel[(hidden.size(0),)](
        hidden,
        hidden.stride(0),
        weight,
        weight.stride(0),
        bias,
        targets,
        temperature,
        unit,
        hidden.size(1),
        transform.scale,
        transform.temperature,
        MARGIN,
        HAS_BIAS=bias is not None,
        ROW_TEMPERATURE=temperature is not None,
        BLOCK=_FEATURES,
        num_warps=_WARPS,
    )
    return unit


def scale_exponentials_torch(
    others: Tensor,
    unit: Tensor,
    target_logits: Tensor,
    upstream: Tensor,
    temperature: Tensor | None,
    transform: TileTransform,
) -> tuple[Tensor, Tensor]:
    """(-g s / S, g s (1 - p_t)) of each row [n], s the slope of the transform.

    They are what a row's exponentials are multiplied with, and the gradient of the target's logit,
    for an upstream gradient g of log_probs. A masked target has none.
    """
    total = others + torch.exp(target_logits - unit)
    slope = upstream * transform.scale
    slope = slope / (transform.temperature if temperature is None else temperature)
    rest = torch.where(target_logits == -float("inf"), 0.0, slope * (others / total))
    return -slope / total, rest


@jit
def lm_head_scale_kernel(
    others_ptr,
    unit_ptr,
    target_logits_ptr,
    upstream_ptr,
    temperature_ptr,
    scale_ptr,
    rest_ptr,
    rows,
    scale,
    temperature,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    others = tl.load(others_ptr + row, mask=inside, other=1.0)
    logit = tl.load(target_logits_ptr + row, mask=inside, other=0.0)
    total = others + tl.exp(logit - tl.load(unit_ptr + row, mask=inside, other=0.0))
    slope = tl.load(upstream_ptr + row, mask=inside, other=0.0) * scale
    if ROW_TEMPERATURE:
        slope = tl.div_rn(slope, tl.load(temperature_ptr + row, mask=inside, other=1.0))
    else:
        slope = slope * tl.div_rn(1.0, temperature)
    rest = tl.where(logit == float("-inf"), 0.0, slope * tl.div_rn(others, total))
    tl.store(scale_ptr + row, tl.div_rn(-slope, total), mask=inside)
    tl.store(rest_ptr + row, rest, mask=inside)


def scale_exponentials_triton(
    others: Tensor,
    unit: Tensor,
    target_logits: Tensor,
    upstream: Tensor,
    temperature: Tensor | None,
    transform: TileTransform,
) -> tuple[Tensor, Tensor]:
    """`scale_exponentials_torch` as one kernel launch."""
    scale, rest = torch.empty_like(others), torch.empty_like(others)
    rows = others.numel()
    lm_head_scale_kernel[(-(-rows // _CHUNK),)](
        others,
        unit,
        target_logits,
        upstream,
        temperature,
        scale,
        rest,
        rows,
        transform.scale,
        transform.temperature,
        ROW_TEMPERATURE=temperature is not None,
        BLOCK=_CHUNK,
        num_warps=_WARPS,
    )
    return scale, rest


def _unit_variant(bias: str | None, per_row: bool) -> tuple[str, dict[str, str], Any, int]:
    types = {"hidden_ptr": "*bf16", "weight_ptr": "*bf16", "targets_ptr": "*i64"}
    types |= {"unit_ptr": "*fp32"} | dict.fromkeys(("scale", "temperature", "margin"), "fp32")
    types |= dict.fromkeys(("hidden_stride", "weight_stride", "features"), "i32")
    constants: dict[str, object] = {"HAS_BIAS": bias is not None, "BLOCK": _FEATURES}
    for pointer, kind in (("bias_ptr", bias), ("temperature_ptr", "fp32" if per_row else None)):
        if kind is None:
            constants[pointer] = None
        else:
            types[pointer] = f"*{kind}"
    return ("lm_head_unit_kernel", types, constants | {"ROW_TEMPERATURE": per_row}, _WARPS)


def _scale_variant(per_row: bool) -> tuple[str, dict[str, str], Any, int]:
    floats = ("others", "unit", "target_logits", "upstream", "scale", "rest")
    types = {f"{name}_ptr": "*fp32" for name in floats}
    types |= {"rows": "i32", "scale": "fp32", "temperature": "fp32"}
    constants: dict[str, object] = {"ROW_TEMPERATURE": per_row, "BLOCK": _CHUNK}
    if per_row:
        types["temperature_ptr"] = "*fp32"
    else:
        constants["temperature_ptr"] = None
    return ("lm_head_scale_kernel", types, constants, _WARPS)


AOT_VARIANTS = [
    _unit_variant(None, False),
    _unit_variant("bf16", True),
    _scale_variant(False),
    _scale_variant(True),
]
