"""Right answers for the tests: every sequence alone, full logits, float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import TrainerCallback

Gradients = Mapping[str, torch.Tensor | None]
# Float32 training against float64: a few hundred roundings of 6e-8.
# A GPU sums in other orders: 1.3e-5 was seen on an H200.
TOLERANCE = 3e-5 if torch.cuda.is_available() else 1e-5


def in_float64(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU, in train mode, without what trainers patched into `model`."""
    twin = copy.deepcopy(model).cpu().double()
    twin.__dict__.pop("forward", None)
    twin.zero_grad(set_to_none=True)
    return twin.train()


def log_probs(model: nn.Module, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [length - 1] of the tokens of one sequence but the first."""
    tokens = torch.tensor([list(ids)])
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return (
        torch.log_softmax(logits.double() / temperature, dim=-1)
        .gather(1, tokens[0, 1:, None])
        .squeeze(1)
    )


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradient of every trainable parameter, by name."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().cpu().double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class GradientRecord(TrainerCallback):
    """Keeps the gradients of every optimizer step of a trainer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(gradients(model))


def assert_close(found: float, wanted: float, tolerance: float = TOLERANCE) -> None:
    """|found - wanted| <= tolerance * max(1, |wanted|); never true of nan."""
    assert abs(found - wanted) <= tolerance * max(1.0, abs(wanted)), f"{found}, wanted {wanted}"


def assert_same_gradients(
    found: Gradients, wanted: Gradients, tolerance: float = TOLERANCE
) -> None:
    """Same parameters, none missing, each within tolerance of its own largest element.

    An element below a hundredth of the largest of all parameters counts as that.
    """
    assert found.keys() == wanted.keys()
    floor = 0.01 * max(right.abs().max().item() for right in wanted.values())
    for name, right in wanted.items():
        assert found[name] is not None, f"{name} has no gradient"
        error = (found[name] - right).abs().max().item()
        scale = max(floor, right.abs().max().item())
        assert error <= tolerance * scale, f"gradient of {name} is off by {error}, scale {scale}"
