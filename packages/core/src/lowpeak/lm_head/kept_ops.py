"""Operators that make gradients from what the forward kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .chunks import mean_weight
from .expectation import expectation_counter, judge
from .ops import lm_head_backward
from .output import DIFFERENTIABLE_NAMES
from .refusals import double_backward_error
from .tiles import HeadInputs


@torch.library.custom_op("lowpeak::lm_head_unit_backward", mutates_args=())
def lm_head_unit_backward(
    unit: Tensor,
    normalizer: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    log_probs: Tensor | None,
    log_normalizer: Tensor | None,
    mean_logits: Tensor | None,
    scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    ignore_index: int | None,
) -> list[Tensor]:
    """Gradient of hidden [N, H] from `unit`, d log_prob / d hidden of each row, and `normalizer`,
    d log_normalizer / d hidden.

    `log_probs`, `log_normalizer` and `mean_logits` [N] are upstream gradients. The mean of the
    logits has the same gradient in every row, but for the transform's slope, which must not depend
    on the logit.
    """
    statistics = torch.promote_types(compute_dtype, torch.float32)
    parts = [
        (kept, _column(upstream, targets, ignore_index, statistics))
        for kept, upstream in ((unit, log_probs), (normalizer, log_normalizer))
        if kept is not None and upstream is not None
    ]
    if mean_logits is not None:
        transform = TileTransform(scale, 0.0, temperature)
        inputs = HeadInputs(unit, weight, bias, temperature_rows, transform, compute_dtype)
        slope = inputs.slope
        rows = _column(mean_logits, targets, ignore_index, statistics)
        rows = rows * (slope.unsqueeze(1) if isinstance(slope, Tensor) else slope)
        parts.append((mean_weight(inputs).expand(unit.shape), rows))
    gradient = torch.empty(unit.shape, dtype=hidden_dtype, device=unit.device)
    if len(parts) == 1:
        _scale(*parts[0], gradient)
    else:
        total = torch.zeros(unit.shape, dtype=statistics, device=unit.device)
        for kept, rows in parts:
            total.addcmul_(kept.to(statistics), rows)
        gradient.copy_(total)
    return [gradient]


@lm_head_unit_backward.register_fake
def _(
    unit: Tensor,
    normalizer: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    log_probs: Tensor | None,
    log_normalizer: Tensor | None,
    mean_logits: Tensor | None,
    scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    ignore_index: int | None,
) -> list[Tensor]:
    return [unit.new_empty(unit.shape, dtype=hidden_dtype)]


lm_head_unit_backward.register_autograd(double_backward_error("fused_lm_head"))


def _column(
    upstream: Tensor, targets: Tensor, ignore_index: int | None, dtype: torch.dtype
) -> Tensor:
    """Upstream gradients as [N, 1], 0 in ignored rows."""
    if ignore_index is not None:
        upstream = torch.where(targets == ignore_index, 0.0, upstream)
    return upstream.to(dtype).unsqueeze(1)


@torch.library.custom_op("lowpeak::lm_head_expected_backward", mutates_args=())
def lm_head_expected_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    low_hidden: Tensor | None,
    low_weight: Tensor | None,
    saved: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    keep: Sequence[bool],
    kept: Sequence[Tensor],
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
    """`lm_head_backward` from the gradients that the forward `kept`, where the upstream gradients
    are a multiple of the `expected` ones; the exact recompute where they are not.

    One host synchronisation. What was kept stays as it is.
    """
    statistics = torch.promote_types(compute_dtype, torch.float32)
    verdict = judge(
        _named(expected, targets, ignore_index, statistics),
        _named(upstream, targets, ignore_index, statistics),
    )
    if verdict.counts:
        expectation_counter("fused_lm_head").record(verdict.held)
    needs = (needs_hidden, needs_weight, needs_bias, needs_low_hidden, needs_low_weight)
    if not verdict.held:
        tensors = (hidden, weight, bias, targets, temperature_rows, low_hidden, low_weight)
        transform = (scale, softcap, temperature, compute_dtype, ignore_index)
        if scratch_bytes is not None and keep[1]:  # what was kept is still there
            of_weight = kept[int(keep[0])]
            scratch_bytes -= of_weight.nbytes if of_weight.dtype != weight.dtype else 0
        options = (skip_zero_rows, *needs, scratch_bytes, backend)
        return list(lm_head_backward(*tensors, saved, upstream, None, *transform, *options))
    remaining = iter(kept)
    results = []
    owners = (hidden, weight, bias, low_hidden, low_weight)
    for like, was_kept, need in zip(owners, keep, needs, strict=True):
        source = next(remaining) if was_kept else None
        if need and source is not None and like is not None:
            results.append(_scaled(source, verdict.factor, like))
    return results


@lm_head_expected_backward.register_fake
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
    expected: Sequence[Tensor | None],
    keep: Sequence[bool],
    kept: Sequence[Tensor],
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


lm_head_expected_backward.register_autograd(double_backward_error("fused_lm_head"))


def _named(
    values: Sequence[Tensor | None], targets: Tensor, ignore_index: int | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients by output, 0 in ignored rows."""
    named = {
        name: x.to(dtype)
        for name, x in zip(DIFFERENTIABLE_NAMES, values, strict=True)
        if x is not None
    }
    if ignore_index is None:
        return named
    ignored = targets == ignore_index
    return {name: torch.where(ignored, 0.0, x) for name, x in named.items()}


def _scaled(kept: Tensor, factor: float, like: Tensor) -> Tensor:
    """factor * kept, rounded once to the dtype of `like`; 0 in the rows that kept does not have."""
    result = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    height = kept.size(0)
    _scale(kept, factor, result[:height])
    result[height:].zero_()
    return result


# The CPU multiplies mixed dtypes through copies in the wider one.
_CPU_ELEMENTS = 1 << 18


def _scale(kept: Tensor, factors: Tensor | float, out: Tensor) -> None:
    """out = factors * kept, computed in the wider dtype and rounded once; `factors` has a number
    for each row, or is one for all."""
    rows = kept.size(0)
    if kept.device.type == "cpu":
        rows = max(_CPU_ELEMENTS * rows // max(kept.numel(), 1), 1)
    for start in range(0, kept.size(0), max(rows, 1)):
        part = slice(start, start + rows)
        factor = factors[part] if isinstance(factors, Tensor) else factors
        torch.mul(kept[part], factor, out=out[part])
