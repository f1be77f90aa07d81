"""Argument checks of `fused_lm_head`: everything that shapes and dtypes can tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .output import OUTPUT_NAMES
from .transform import LogitTransform

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    outputs: Sequence[str],
    row_selection: str,
    scratch_bytes: int | None,
    backend: str,
) -> tuple[str, ...]:
    """The output names, in the order of OUTPUT_NAMES.

    Raises:
        TypeError, ValueError: with the argument's name, what it is and what it should be.
    """
    _check_tensors(hidden, weight, targets, bias, transform)
    if isinstance(outputs, str):
        raise TypeError(f"outputs={outputs!r} is a string: pass a tuple of names, ({outputs!r},)")
    unknown = [name for name in outputs if name not in OUTPUT_NAMES]
    if unknown or not outputs:
        raise ValueError(f"outputs={tuple(outputs)!r}: pass at least one of {OUTPUT_NAMES}")
    if row_selection not in ("valid", "all"):
        raise ValueError(f"row_selection={row_selection!r}: pass 'valid' or 'all'")
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend={backend!r}: pass 'auto', 'triton' or 'torch'")
    if scratch_bytes is not None and not isinstance(scratch_bytes, int):
        raise TypeError(f"scratch_bytes={scratch_bytes!r}: pass a whole number of bytes or None")
    if scratch_bytes is not None and scratch_bytes <= 0:
        raise ValueError(f"scratch_bytes={scratch_bytes}: pass a positive number of bytes or None")
    return tuple(name for name in OUTPUT_NAMES if name in outputs)


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
) -> None:
    floats = {"hidden": hidden, "weight": weight}
    if bias is not None:
        floats["bias"] = bias
    for name, value in {**floats, "targets": targets}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {value!r}: pass a tensor")
    if not isinstance(transform, LogitTransform):
        raise TypeError(f"transform is {transform!r}: pass a LogitTransform")
    for name, x in floats.items():
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}: pass one of {_FLOATS}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets has dtype {targets.dtype}: pass int64 token ids")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: pass [V, H], neither of them 0")
    if hidden.dim() == 0 or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}: "
            "their last dimensions must agree"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}: pass {tuple(hidden.shape[:-1])}, "
            "that of hidden without its last dimension"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: pass ({weight.size(0)},)")
    others = {**floats, "targets": targets}
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(f"temperature has dtype {temperature.dtype}: pass a floating-point one")
        if temperature.shape != targets.shape:
            raise ValueError(
                f"temperature has shape {tuple(temperature.shape)}: pass a number or "
                f"{tuple(targets.shape)}, the shape of targets"
            )
        others["temperature"] = temperature
    for name, x in others.items():
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device} and hidden on {hidden.device}")
