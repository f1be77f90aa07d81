"""Inputs of the LM head benchmark and their loss and gradients in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowpeak_bench.peers import Adapter, HeadProblem


@dataclass(frozen=True)
class HeadShape:
    """Vocabulary and hidden size of a model's LM head."""

    name: str
    vocabulary: int
    hidden: int


@dataclass(frozen=True)
class Reference:
    """Float32 log-probabilities [N] and gradients of the mean loss, by the names of its inputs."""

    log_probs: Tensor
    gradients: dict[str, Tensor]


def make_problem(
    shape: HeadShape, tokens: int, dtype: torch.dtype, device: torch.device, weight_std: float
) -> HeadProblem:
    """Draw RMS-normed hidden states, normal weights and uniform targets; the weight is trained."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, shape.hidden, generator=generator, device=device)
    hidden *= hidden.square().mean(-1, keepdim=True).rsqrt()
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=generator, device=device)
    weight *= weight_std
    targets = torch.randint(shape.vocabulary, (tokens,), generator=generator, device=device)
    return HeadProblem(
        hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets
    )


def with_adapter(problem: HeadProblem, rank: int) -> HeadProblem:
    """The problem with a frozen weight and a trained LoRA adapter of scale 2 on it.

    Both factors are normal. What the adapter adds to the logits has half of their deviation.
    """
    hidden, weight = problem.hidden, problem.weight.detach()
    generator = torch.Generator(hidden.device).manual_seed(1)
    vocabulary, width = weight.shape
    a = torch.randn(rank, width, generator=generator, device=hidden.device) / width**0.5
    b = torch.randn(vocabulary, rank, generator=generator, device=hidden.device)
    b *= weight.float().std() * width**0.5 / (4 * rank**0.5)
    a, b = (x.to(weight.dtype).requires_grad_() for x in (a, b))
    return problem._replace(weight=weight, adapter=Adapter(a, b, alpha=2 * rank))


@torch.no_grad()
def float32_reference(problem: HeadProblem, rows: int = 512) -> Reference:
    """Log-probabilities and gradients in float32, `rows` tokens at a time.

    A weight with an adapter has no gradient.
    """
    hidden, weight = problem.hidden.float(), problem.weight.float()
    adapter = problem.adapter
    if adapter is not None:
        weight = weight.addmm(adapter.b.float(), adapter.a.float(), alpha=adapter.scale)
    tokens = len(hidden)
    log_probs = hidden.new_empty(tokens)
    hidden_gradient = torch.empty_like(hidden)
    weight_gradient = torch.zeros_like(weight)
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        targets = problem.targets[part, None]
        logits = (hidden[part] @ weight.t()).log_softmax(-1)
        log_probs[part] = logits.gather(-1, targets).squeeze(-1)
        gradient = logits.exp_()
        gradient.scatter_add_(-1, targets, torch.full_like(targets, -1, dtype=gradient.dtype))
        gradient /= tokens
        hidden_gradient[part] = gradient @ weight
        weight_gradient.addmm_(gradient.t(), hidden[part])
    gradients = {"hidden": hidden_gradient}
    if adapter is None:
        gradients["weight"] = weight_gradient
    else:
        gradients["adapter_a"] = adapter.scale * adapter.b.float().t() @ weight_gradient
        gradients["adapter_b"] = adapter.scale * weight_gradient @ adapter.a.float().t()
    return Reference(log_probs, gradients)
