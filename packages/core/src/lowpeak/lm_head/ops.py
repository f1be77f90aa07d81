"""The two inner operators: fixed schemas, opaque to the compiler, opaque to autograd.

With `ignore_index` given they select the rows themselves, which keeps every shape static for
torch.compile; eager callers select beforehand and save fewer hidden rows for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .backward import run_backward
from .forward import run_forward
from .output import OUTPUT_NAMES
from .refusals import double_backward_error
from .rows import gathered, scattered, select_rows
from .statistics import row_coefficients
from .tiles import HeadInputs

SAVED_NAMES = ("log_probs", "centre", "sum_exp", "entropy", "log_sum_sq_probs")
DIFFERENTIABLE_NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "log_normalizer")


def result_names(outputs: int) -> tuple[str, ...]:
    """What an output flag set makes the forward return: log_probs, centre and sum_exp always."""
    asked = (name for bit, name in enumerate(OUTPUT_NAMES) if outputs >> bit & 1)
    return ("log_probs", "centre", "sum_exp", *(name for name in asked if name != "log_probs"))


def output_flags(names: Sequence[str]) -> int:
    """The flag set of some output names."""
    return sum(1 << OUTPUT_NAMES.index(name) for name in names)


@torch.library.custom_op("lowpeak::lm_head_forward", mutates_args=())
def lm_head_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    outputs: int,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Statistics of hidden [N, H], one [N] tensor for each of `result_names(outputs)`."""
    transform = TileTransform(scale, softcap, temperature)
    inputs = HeadInputs(hidden, weight, bias, temperature_rows, transform, compute_dtype)
    rows, inputs, targets = _selected(inputs, targets, ignore_index)
    names = result_names(outputs)
    with torch.autocast(hidden.device.type, enabled=False):
        results = run_forward(inputs, targets, names, scratch_bytes, backend)
    return [scattered(results[name], rows, hidden.size(0)) for name in names]


@lm_head_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    outputs: int,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    dtype = torch.promote_types(compute_dtype, torch.float32)
    return [
        hidden.new_empty(hidden.size(0), dtype=torch.bool if name == "is_top1" else dtype)
        for name in result_names(outputs)
    ]


@torch.library.custom_op("lowpeak::lm_head_backward", mutates_args=())
def lm_head_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of hidden, weight and bias, those that are needed, in this order.

    `saved` follows SAVED_NAMES, `upstream` DIFFERENTIABLE_NAMES; both hold [N] tensors or None.
    """
    transform = TileTransform(scale, softcap, temperature)
    inputs = HeadInputs(hidden, weight, bias, temperature_rows, transform, compute_dtype)
    rows, inputs, targets = _selected(inputs, targets, ignore_index)
    dtype = inputs.statistics_dtype
    statistics = {
        name: gathered(x, rows) for name, x in zip(SAVED_NAMES, saved, strict=True) if x is not None
    }
    gradients = {
        name: gathered(x, rows).to(dtype).contiguous()
        for name, x in zip(DIFFERENTIABLE_NAMES, upstream, strict=True)
        if x is not None
    }
    needs = (needs_hidden, needs_weight, needs_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        coefficients = row_coefficients(statistics, gradients, weight.size(0))
        grad_hidden, grad_weight, grad_bias = run_backward(
            inputs,
            targets,
            coefficients,
            needs,
            scratch_bytes,
            backend,
        )
    if grad_hidden is not None:
        grad_hidden = scattered(grad_hidden, rows, hidden.size(0))
    return [x for x in (grad_hidden, grad_weight, grad_bias) if x is not None]


@lm_head_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    needed = ((hidden, needs_hidden), (weight, needs_weight), (bias, needs_bias))
    return [x.new_empty(x.shape) for x, need in needed if need and x is not None]


lm_head_backward.register_autograd(double_backward_error("fused_lm_head"))


def _selected(
    inputs: HeadInputs, targets: Tensor, ignore_index: int | None
) -> tuple[Tensor | None, HeadInputs, Tensor]:
    """The rows that count (None: all), and the inputs and targets cut down to them."""
    rows = None
    if ignore_index is not None:
        rows = select_rows(
            targets, inputs.weight.size(0), ignore_index, inputs.temperature, inputs.bias
        )
    return rows, inputs.selected(rows), gathered(targets, rows).contiguous()
