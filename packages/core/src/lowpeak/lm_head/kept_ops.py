"""Operators that make gradients from what the forward kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .chunks import mean_weight
from .refusals import double_backward_error
from .tiles import HeadInputs


@torch.library.custom_op("lowpeak::lm_head_unit_backward", mutates_args=())
def lm_head_unit_backward(
    unit: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    log_probs: Tensor | None,
    mean_logits: Tensor | None,
    scale: float,
    temperature: float,
    compute_dtype: torch.dtype,
    hidden_dtype: torch.dtype,
    ignore_index: int | None,
) -> list[Tensor]:
    """Gradient of hidden [N, H] from `unit`, d log_prob / d hidden of each row.

    `log_probs` and `mean_logits` [N] are upstream gradients. The mean of the logits has the same
    gradient in every row, but for the transform's slope, which must not depend on the logit.
    """
    statistics = torch.promote_types(compute_dtype, torch.float32)
    gradient = torch.empty(unit.shape, dtype=hidden_dtype, device=unit.device)
    if log_probs is None:
        gradient.zero_()
    else:
        torch.mul(unit, _column(log_probs, targets, ignore_index, statistics), out=gradient)
    if mean_logits is not None:
        transform = TileTransform(scale, 0.0, temperature)
        inputs = HeadInputs(unit, weight, bias, temperature_rows, transform, compute_dtype)
        slope = inputs.slope
        if isinstance(slope, Tensor):
            slope = slope.unsqueeze(1)
        rows = _column(mean_logits, targets, ignore_index, statistics) * slope
        gradient.add_(rows * mean_weight(inputs))
    return [gradient]


@lm_head_unit_backward.register_fake
def _(
    unit: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature_rows: Tensor | None,
    log_probs: Tensor | None,
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
