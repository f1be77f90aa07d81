"""The inner operators: fixed schemas, opaque to the compiler, opaque to autograd.

With `ignore_index` given they select the rows themselves, which keeps every shape static for
torch.compile; eager callers select beforehand and save fewer hidden rows for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .backward import run_backward
from .chunks import Keep
from .low_rank_inputs import LowRankFactors
from .output import DIFFERENTIABLE_NAMES, OUTPUT_NAMES
from .passes import HeadRows, pays_to_select, run_head
from .refusals import double_backward_error
from .rows import gathered, nonzero_rows, scattered
from .statistics import row_coefficients
from .tiles import HeadInputs

SAVED_NAMES = ("log_probs", "centre", "sum_exp", "entropy", "log_sum_sq_probs")


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
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    outputs: int,
    phase: str,
    keep_hidden: bool,
    keep_weight: torch.dtype | None,
    keep_bias: bool,
    keep_normalizer: bool,
    keep_low_hidden: bool,
    keep_low_weight: bool,
    keep_logits: int,
    expected: Sequence[Tensor | None],
    active: int | None,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Statistics of hidden [N, H], one [N] tensor for each of `result_names(outputs)`.

    `low_hidden` [N, R] @ `low_weight` [V, R].T is added to the raw logits.

    Then the gradients of hidden, weight, bias, low_hidden and low_weight that are to be kept: for
    the `expected` upstream gradients [N] of DIFFERENTIABLE_NAMES, zero but for the first `active`
    rows; or, where the list
    is empty, the gradients of hidden for log_probs gradients of 1 and, with `keep_normalizer`, for
    log_normalizer gradients of 1. Or the raw logits of the first `keep_logits` rows.
    """
    transform = TileTransform(scale, softcap, temperature)
    low = LowRankFactors.of(low_hidden, low_weight)
    inputs = HeadInputs(hidden, weight, bias, temperature_rows, transform, compute_dtype, low=low)
    rows = HeadRows.of(inputs, targets, _named(expected, compute_dtype), ignore_index, active)
    names = result_names(outputs)
    keep = Keep(
        phase,
        keep_hidden,
        keep_weight,
        keep_bias,
        keep_normalizer,
        keep_low_hidden,
        keep_low_weight,
        keep_logits,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        results, kept = run_head(rows, names, keep, scratch_bytes, backend)
    total = hidden.size(0)
    for place in keep.row_places():
        kept[place] = scattered(kept[place], rows.active_places, total)
    return [*(scattered(results[name], rows.places, total) for name in names), *kept]


@lm_head_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    outputs: int,
    phase: str,
    keep_hidden: bool,
    keep_weight: torch.dtype | None,
    keep_bias: bool,
    keep_normalizer: bool,
    keep_low_hidden: bool,
    keep_low_weight: bool,
    keep_logits: int,
    expected: Sequence[Tensor | None],
    active: int | None,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    dtype = torch.promote_types(compute_dtype, torch.float32)
    results = [
        hidden.new_empty(hidden.size(0), dtype=torch.bool if name == "is_top1" else dtype)
        for name in result_names(outputs)
    ]
    height = hidden.size(0) if active is None or ignore_index is not None else active
    vocabulary, width = weight.shape
    if keep_hidden:
        kind = Keep().hidden_dtype(hidden.dtype, compute_dtype)
        results += [hidden.new_empty(height, width, dtype=kind) for _ in range(1 + keep_normalizer)]
    if keep_weight is not None:
        results.append(hidden.new_empty(vocabulary, width, dtype=keep_weight))
    if keep_bias:
        results.append(hidden.new_empty(vocabulary, dtype=dtype))
    if keep_low_hidden and low_hidden is not None:
        results.append(hidden.new_empty(height, low_hidden.size(1), dtype=dtype))
    if keep_low_weight and low_weight is not None:
        results.append(hidden.new_empty(low_weight.shape, dtype=dtype))
    if keep_logits:
        kind = dtype if compute_dtype == torch.float16 else compute_dtype
        results.append(hidden.new_empty(keep_logits, -(-vocabulary // 8) * 8, dtype=kind))
    return results


@torch.library.custom_op("lowpeak::lm_head_backward", mutates_args=())
def lm_head_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    logits: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    skip_zero_rows: bool,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_low_hidden: bool,
    needs_low_weight: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of hidden, weight, bias, low_hidden and low_weight, those that are needed, in this
    order.

    `saved` follows SAVED_NAMES, `upstream` DIFFERENTIABLE_NAMES; both hold [N] tensors or None.
    `logits`: the raw ones of the first rows, where they were kept. `skip_zero_rows`: rows without
    an upstream gradient cost nothing, and one host synchronisation.
    """
    transform = TileTransform(scale, softcap, temperature)
    low = LowRankFactors.of(low_hidden, low_weight)
    inputs = HeadInputs(hidden, weight, bias, temperature_rows, transform, compute_dtype, low=low)
    rows = HeadRows.of(inputs, targets, {}, ignore_index, None)
    places = rows.places
    gradients = {name: gathered(x, places) for name, x in _named(upstream, compute_dtype).items()}
    needs = (needs_hidden, needs_weight, needs_bias, needs_low_hidden, needs_low_weight)
    if scratch_bytes is not None and logits is not None:
        scratch_bytes -= logits.numel() * logits.element_size()
    if skip_zero_rows:
        busy = nonzero_rows(gradients)
        if busy is not None and pays_to_select(busy.size(0), rows.active, logits, needs):
            logits = None
            rows = rows.selected(busy)
            gradients = {name: x.index_select(0, busy) for name, x in gradients.items()}
            places = rows.places
    statistics = {
        name: gathered(x, places)
        for name, x in zip(SAVED_NAMES, saved, strict=True)
        if x is not None
    }
    gradients = {name: x.contiguous() for name, x in gradients.items()}
    with torch.autocast(hidden.device.type, enabled=False):
        coefficients = row_coefficients(statistics, gradients, weight.size(0))
        found = run_backward(
            rows.inputs, rows.targets, coefficients, needs, logits, scratch_bytes, backend
        )
    needed = [of_rows for of_rows, need in zip(_OF_ROWS, needs, strict=True) if need]
    return [
        scattered(x, places, hidden.size(0)) if of_rows else x
        for x, of_rows in zip(found, needed, strict=True)
    ]


@lm_head_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    logits: Tensor | None,
    scale: float,
    softcap: float,
    temperature: float,
    compute_dtype: torch.dtype,
    ignore_index: int | None,
    skip_zero_rows: bool,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_low_hidden: bool,
    needs_low_weight: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    tensors = (hidden, weight, bias, low_hidden, low_weight)
    needs = (needs_hidden, needs_weight, needs_bias, needs_low_hidden, needs_low_weight)
    needed = zip(tensors, needs, strict=True)
    return [x.new_empty(x.shape) for x, need in needed if need and x is not None]


lm_head_backward.register_autograd(double_backward_error("fused_lm_head"))


# Whether a gradient has a row for each token.
_OF_ROWS = (True, False, False, True, False)


def _named(values: Sequence[Tensor | None], compute_dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of DIFFERENTIABLE_NAMES by name, in the statistics' dtype."""
    dtype = torch.promote_types(compute_dtype, torch.float32)
    names = zip(DIFFERENTIABLE_NAMES, values, strict=False)  # an empty list names none
    return {name: x.to(dtype) for name, x in names if x is not None}
