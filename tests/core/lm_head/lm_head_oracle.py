"""The head with all its logits, in plain torch: the truth (float64) and the yardstick (float32).

Everything here is written from the contract of `fused_lm_head`, never from its code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTPUTS = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "log_normalizer",
    "is_top1",
)
DIFFERENTIABLE = OUTPUTS[:-1]


@dataclass(frozen=True)
class Transform:
    """The logit transform as plain numbers; temperature a float or shaped like targets."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0


IDENTITY = Transform()


@dataclass
class Evaluation:
    """Outputs and gradients of one evaluation, all detached."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Any]
    largest_logit: float


def transformed_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: Transform, dtype: torch.dtype
) -> Tensor:
    """z = softcap * tanh(scale * (hidden W^T + bias) / softcap) / temperature, [..., V], in dtype.

    The projection runs in the dtype of its operands, everything after it in `dtype`. An entry of
    the bias that is -inf stays -inf and carries no gradient.
    """
    masked = None
    if bias is not None:
        masked = torch.isneginf(bias)
        bias = bias.masked_fill(masked, 0.0)
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).unsqueeze(-1)
    logits = logits / temperature
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    return logits


def statistics(logits: Tensor, targets: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """The six outputs from all logits [..., V]; ignored rows are 0 (False)."""
    valid = targets != ignore_index
    index = targets.where(valid, torch.zeros_like(targets)).unsqueeze(-1)
    log_p = torch.log_softmax(logits, -1)
    finite_log_p = log_p.masked_fill(torch.isneginf(logits), 0.0)
    values = {
        "log_probs": log_p.gather(-1, index).squeeze(-1),
        "entropy": -(log_p.exp() * finite_log_p).sum(-1),
        "log_sum_sq_probs": torch.logsumexp(2 * log_p, -1),
        "mean_logits": logits.mean(-1),
        "log_normalizer": torch.logsumexp(logits, -1),
    }
    values = {name: value.where(valid, torch.zeros_like(value)) for name, value in values.items()}
    # argmax does not promise the first of equals; the first column that reaches the maximum does.
    columns = torch.arange(logits.shape[-1], device=logits.device)
    reaches = logits.detach() == logits.detach().amax(-1, keepdim=True)
    first = columns.where(reaches, torch.full_like(columns, logits.shape[-1])).amin(-1)
    values["is_top1"] = (first == targets) & valid
    return values


def evaluate(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    transform: Transform = IDENTITY,
    *,
    ignore_index: int = -100,
    upstream: Mapping[str, Tensor] | None = None,
    logits_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Evaluation:
    """Outputs and, with `upstream` gradients by output name, gradients of hidden, weight and bias.

    Truth: logits_dtype = dtype = float64. Yardstick of a narrow dtype: logits_dtype that dtype,
    dtype float32, which is log_softmax in float32 over logits of that dtype.
    """
    leaves = {
        name: tensor.detach().to(logits_dtype).requires_grad_()
        for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias))
        if tensor is not None
    }
    logits = transformed_logits(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), transform, dtype
    )
    outputs = statistics(logits, targets, ignore_index)
    gradients: dict[str, Any] = dict.fromkeys(("hidden", "weight", "bias"))
    if upstream:
        names = list(upstream)
        torch.autograd.backward(
            [outputs[name] for name in names], [upstream[name].to(dtype) for name in names]
        )
        gradients.update({name: leaf.grad for name, leaf in leaves.items()})
    return Evaluation(
        {name: value.detach() for name, value in outputs.items()},
        gradients,
        _largest_finite(logits.detach()),
    )


def top1_is_decided(logits: Tensor, margin: float) -> Tensor:
    """Rows whose largest logit leads the second by more than margin (all rows when V is 1)."""
    if logits.shape[-1] == 1:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1] > margin


def random_upstream(
    names: Sequence[str], targets: Tensor, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Independent normal upstream gradients per token for each differentiable output in names."""
    return {
        name: torch.randn(targets.shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(targets.device)
        for name in names
        if name in DIFFERENTIABLE
    }


def _largest_finite(logits: Tensor) -> float:
    finite = logits[torch.isfinite(logits)]
    return float(finite.abs().max()) if finite.numel() else 0.0
