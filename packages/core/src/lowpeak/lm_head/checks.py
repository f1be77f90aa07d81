"""Argument checks of the heads: everything that shapes and dtypes can tell."""

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
    check_head("", hidden, weight, bias, transform)
    check_targets(targets, hidden)
    if isinstance(outputs, str):
        raise TypeError(f"outputs={outputs!r} is a string: pass a tuple of names, ({outputs!r},)")
    unknown = [name for name in outputs if name not in OUTPUT_NAMES]
    if unknown or not outputs:
        raise ValueError(f"outputs={tuple(outputs)!r}: pass at least one of {OUTPUT_NAMES}")
    check_options(row_selection, scratch_bytes, backend)
    return tuple(name for name in OUTPUT_NAMES if name in outputs)


def check_options(row_selection: str, scratch_bytes: int | None, backend: str) -> None:
    """Check what says how to compute, not what.

    Raises:
        TypeError, ValueError: with the argument's name and what it should be.
    """
    if row_selection not in ("valid", "all"):
        raise ValueError(f"row_selection={row_selection!r}: pass 'valid' or 'all'")
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend={backend!r}: pass 'auto', 'triton' or 'torch'")
    if scratch_bytes is not None and not isinstance(scratch_bytes, int):
        raise TypeError(f"scratch_bytes={scratch_bytes!r}: pass a whole number of bytes or None")
    if scratch_bytes is not None and scratch_bytes <= 0:
        raise ValueError(f"scratch_bytes={scratch_bytes}: pass a positive number of bytes or None")


def check_head(
    prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform
) -> None:
    """Check one head, whose arguments are called `prefix` + hidden, weight, bias, transform.

    Raises:
        TypeError, ValueError: with the argument's name and what it should be.
    """
    floats = {f"{prefix}hidden": hidden, f"{prefix}weight": weight}
    if bias is not None:
        floats[f"{prefix}bias"] = bias
    for name, value in floats.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {value!r}: pass a tensor")
    if not isinstance(transform, LogitTransform):
        raise TypeError(f"{prefix}transform is {transform!r}: pass a LogitTransform")
    for name, x in floats.items():
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}: pass one of {_FLOATS}")
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"{prefix}weight has shape {tuple(weight.shape)}: pass [V, H], neither of them 0"
        )
    if hidden.dim() == 0 or hidden.size(-1) != weight.size(1):
        raise ValueError(
            f"{prefix}hidden has shape {tuple(hidden.shape)} and {prefix}weight "
            f"{tuple(weight.shape)}: their last dimensions must agree"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{prefix}bias has shape {tuple(bias.shape)}: pass ({weight.size(0)},)")
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(
                f"{prefix}temperature has dtype {temperature.dtype}: pass a floating-point one"
            )
        if temperature.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{prefix}temperature has shape {tuple(temperature.shape)}: pass a number or "
                f"{tuple(hidden.shape[:-1])}, one for each row of {prefix}hidden"
            )
        floats[f"{prefix}temperature"] = temperature
    for name, x in floats.items():
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device} and {prefix}hidden on {hidden.device}")


def check_targets(targets: Tensor, hidden: Tensor) -> None:
    """Check the targets of the rows of `hidden`.

    Raises:
        TypeError, ValueError: for another type, dtype, shape or device.
    """
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets is {targets!r}: pass a tensor")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets has dtype {targets.dtype}: pass int64 token ids")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}: pass {tuple(hidden.shape[:-1])}, "
            "that of hidden without its last dimension"
        )
    if targets.device != hidden.device:
        raise ValueError(f"targets is on {targets.device} and hidden on {hidden.device}")
