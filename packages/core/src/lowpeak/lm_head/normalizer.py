"""Gradients of log_probs and of log_normalizer in hidden from one product, both exact.

With r = sum_j p_j s_j W_j over the tokens j other than the target t (s: slope of the logit
transform), d log p_t = (1 - p_t) s_t W_t - r and d log Z = p_t s_t W_t + r. Neither follows from
the other once that is rounded: where p_t is near 0 or 1 they differ by far in size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.lm_head_fold import RowStatistics
from ..kernels.logit_transform import transform_slope_torch
from .chunks import Keep
from .gemm import product_into
from .tiles import HeadInputs


class NormalizerGradients:
    """Both gradients [N, H] while chunks of rows are added to them."""

    def __init__(
        self, inputs: HeadInputs, keep: Keep, targets: Tensor, sums: RowStatistics
    ) -> None:
        self._inputs = inputs
        self._targets = targets
        self._sums = sums
        shape, device = inputs.hidden.shape, inputs.hidden.device
        dtype = keep.hidden_dtype(inputs.hidden.dtype, inputs.compute_dtype)
        self._log_probs = torch.empty(shape, dtype=dtype, device=device)
        self._normalizer = torch.empty(shape, dtype=dtype, device=device)

    def add(
        self,
        tile: Tensor,
        first: int,
        last: int,
        weight: Tensor,
        hidden: Tensor,
        power: Tensor | None,
    ) -> None:
        """Add rows whose tile [c, V] holds -p of the other tokens, 0 for the target."""
        inputs, sums = self._inputs, self._sums.rows(first, last)
        shape, dtype = hidden.shape, inputs.statistics_dtype
        others = torch.empty(shape, dtype=dtype, device=hidden.device)
        product_into(others, tile, weight)
        if power is not None:
            others.mul_(power)
        logit = sums.target.unsqueeze(1)
        temperature = inputs.rows(first, last).temperature
        slope = transform_slope_torch(logit, temperature, inputs.transform)
        own = weight.index_select(0, self._targets[first:last]).to(dtype)
        if slope is not None:
            own.mul_(slope)
        own.masked_fill_(logit == -float("inf"), 0.0)  # a masked target has no gradient
        odds = sums.sum_exp.unsqueeze(1).log() + (sums.maximum.unsqueeze(1) - logit)
        self._normalizer[first:last] = torch.sigmoid(-odds) * own - others
        self._log_probs[first:last] = others.addcmul_(torch.sigmoid(odds), own)

    def finish(self) -> list[Tensor]:
        """The gradients of log_probs and of log_normalizer."""
        return [self._log_probs, self._normalizer]
