"""From folded sums to the outputs, and from upstream gradients to the coefficients of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.lm_head_fold import RowStatistics
from ..kernels.lm_head_gradient import RowCoefficients


def finish_statistics(
    sums: RowStatistics, vocabulary: int, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The outputs `names`, with log_probs, centre and sum_exp always among them.

    `centre` is the row's largest logit and `sum_exp` the sum of exp(z - centre); kept apart, they
    give p without the rounding of a log-normaliser at large logit offsets.
    With s the sum over the tokens other than the target, p the target's probability and q the
    softmax of the others: log p = -softplus(log s - z_target), and
    H = -p log p - (1 - p) log(1 - p) + (1 - p) H(q). No term cancels when p nears 0 or 1.
    """
    zero = torch.zeros((), dtype=sums.maximum.dtype, device=sums.maximum.device)
    log_sum = sums.sum_exp.log()
    gap = log_sum + (sums.maximum - sums.target)
    log_p = -torch.logaddexp(gap, zero)
    log_rest = -torch.logaddexp(-gap, zero)
    alone = sums.sum_exp == 0  # no other token has a probability
    centre = torch.maximum(sums.maximum, sums.target)
    total = sums.sum_exp * torch.exp(sums.maximum - centre) + torch.exp(sums.target - centre)
    results = {"log_probs": log_p, "centre": centre, "sum_exp": total}
    if "log_normalizer" in names:
        results["log_normalizer"] = centre + total.log()
    if "entropy" in names:
        rest = -torch.expm1(log_p)
        among_others = torch.where(alone, 0.0, log_sum - sums.centred / sums.sum_exp)
        of_others = _times_log(rest, among_others - log_rest)
        results["entropy"] = of_others - _times_log(log_p.exp(), log_p)
    if "log_sum_sq_probs" in names:
        squares = torch.where(alone, -float("inf"), sums.squares.log() - 2 * log_sum)
        results["log_sum_sq_probs"] = torch.logaddexp(2 * log_p, 2 * log_rest + squares)
    if "mean_logits" in names:
        results["mean_logits"] = sums.total / vocabulary
    if "is_top1" in names:
        results["is_top1"] = (sums.target > sums.maximum_before) & (sums.target >= sums.maximum)
    return results


def _times_log(probability: Tensor, logarithm: Tensor) -> Tensor:
    """p * log, with the limit 0 where p is 0."""
    return torch.where(probability == 0, 0.0, probability * logarithm)


def row_coefficients(
    outputs: Mapping[str, Tensor], upstream: Mapping[str, Tensor], vocabulary: int
) -> RowCoefficients:
    """Coefficients of d loss / d z from the `upstream` gradients [N] of the differentiable outputs.

    d log p_t = [j = t] - p_j;  d log Z = p_j;  dH = -p_j (log p_j + H);
    d log sum p^2 = 2 (p_j^2 / sum p^2 - p_j);  d mean z = 1 / V.
    """
    log_p = outputs["log_probs"]
    zeros = torch.zeros_like(log_p)
    target = upstream.get("log_probs", zeros)
    linear = upstream.get("log_normalizer", zeros)
    log_linear = square = constant = None
    if "entropy" in upstream:
        log_linear = -upstream["entropy"]
        linear = linear + log_linear * outputs["entropy"]
    if "log_sum_sq_probs" in upstream:
        twice = 2 * upstream["log_sum_sq_probs"]
        square = twice * torch.exp(-outputs["log_sum_sq_probs"])
        linear = linear - twice
    if "mean_logits" in upstream:
        constant = upstream["mean_logits"] / vocabulary
    return RowCoefficients(
        centre=outputs["centre"],
        inverse_sum=outputs["sum_exp"].reciprocal(),
        log_sum=outputs["sum_exp"].log(),
        linear=linear,
        target=target,
        target_rest=target * -torch.expm1(log_p),
        log_linear=log_linear,
        square=square,
        constant=constant,
    )


# 5 coefficients of at most 2 * 2^12 add up to less than float16's largest number, 65504.
_LARGEST_COEFFICIENT = 12


def normalise(
    coefficients: RowCoefficients, slope: float | Tensor
) -> tuple[RowCoefficients, Tensor]:
    """Coefficients divided by a power of two that brings the largest near 2^12, and that power.

    For float16 gradients of logits, which would underflow at the upstream gradients of a mean over
    many tokens; a power of two changes no digit. `slope` bounds the slope of the logit transform: a
    number or [N].
    """
    names = ("linear", "target", "target_rest", "log_linear", "square", "constant")
    values = ((name, getattr(coefficients, name)) for name in names)
    gradients: dict[str, Tensor] = {name: x for name, x in values if x is not None}
    largest = torch.stack([(x * slope).abs().amax() for x in gradients.values()]).amax()
    power = power_of_two(largest)
    scaled = {name: x / power for name, x in gradients.items()}
    return replace(coefficients, **scaled), power


def power_of_two(largest: Tensor) -> Tensor:
    """What to divide by so that `largest` comes to lie near 2^12; 1 where it is 0 or not finite."""
    power = torch.exp2(torch.log2(largest).floor() - _LARGEST_COEFFICIENT)
    return torch.where(torch.isfinite(power) & (power > 0), power, 1.0)
