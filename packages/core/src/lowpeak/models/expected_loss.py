"""What a caller is going to make of a fused call's outputs, told before the call.

The head then makes its gradients in the forward (`expected_grads` of `fused_lm_head`). The loss is
a function of outputs that look like those the call will return, in the layout of its caller:
differentiating it through the layout gives the gradients in the layout of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowpeak.lm_head import LMHeadOutput, single_pass_serves

from .inspection import Head
from .outputs import FusedCausalLMOutput, per_token, without_last

Expected = Mapping[str, Tensor] | Callable[[LMHeadOutput, Tensor], Mapping[str, Tensor]]


@dataclass(frozen=True)
class ExpectedLoss:
    """The loss of the next fused calls, up to a factor.

    Args:
        of: the loss, a scalar, of a FusedCausalLMOutput with the fields `names` and label_mask. It
            must not synchronise with the device, nor communicate: it runs once a call, or once a
            chunk of tokens.
        names: the outputs that receive a gradient, log_probs first.
        token_local: False, where the gradients do not depend on the outputs' values: they are known
            beforehand. True, where those of a token depend on its own outputs only; `of` is then
            given the outputs of some tokens, and zeros for the others.
    """

    of: Callable[[FusedCausalLMOutput], Tensor]
    names: tuple[str, ...] = ("log_probs",)
    token_local: bool = False


IGNORE_INDEX = -100


def _sum_of_log_probs(output: FusedCausalLMOutput) -> Tensor:
    assert output.log_probs is not None
    return output.log_probs.sum()


# All tokens weigh the same.
SUM_OF_LOG_PROBS = ExpectedLoss(_sum_of_log_probs)

Told = ExpectedLoss | Callable[[], ExpectedLoss | None] | None

_expected: ContextVar[Told] = ContextVar("lowpeak_expected_loss", default=None)


@contextmanager
def expecting(loss: Told) -> Iterator[None]:
    """Tell the fused calls of this context that need gradients what their loss is going to be.

    A function is asked by each of these calls; None says nothing. A loss that turns out another one
    costs time, never correctness; see `fused_lm_head`.
    """
    token = _expected.set(loss)
    try:
        yield
    finally:
        _expected.reset(token)


def expected_loss(
    told: Told,
    restore: Callable[[FusedCausalLMOutput], FusedCausalLMOutput] | None = None,
) -> ExpectedLoss | None:
    """What is expected of a call, whose outputs `restore` is then going to change.

    `told`: None for what the context says.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    told = _expected.get() if told is None else told
    loss = told() if callable(told) else told
    if loss is None or restore is None:
        return loss
    of = loss.of
    return replace(loss, of=lambda output: of(restore(output)))


def expected_grads(
    loss: ExpectedLoss | None,
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    names: tuple[str, ...],
    scratch_bytes: int | None,
) -> Expected | None:
    """`expected_grads` of `fused_lm_head`, None where it would not use them.

    Args:
        loss: of the outputs [batch, length - 1] of the call.
        head: that of the call.
        hidden: [batch, length, H].
        targets: [batch, length], the last of each row ignored.
        names: the outputs of the call.
        scratch_bytes: those of the call.
    """
    if loss is None or not set(loss.names) <= set(names):
        return None
    weight, bias, low_rank = head.weight, head.bias, head.adapters.low_rank
    parts = [weight, bias, *(x for low in low_rank for x in (low.a, low.b))]
    frozen = not any(x is not None and x.requires_grad for x in parts)
    if frozen and not low_rank and loss.names == ("log_probs",):
        return None  # whatever comes, the head scales rows by it, at the same cost
    if not single_pass_serves(hidden, weight, bias, low_rank=low_rank, scratch_bytes=scratch_bytes):
        return None
    mask = targets[:, :-1] != IGNORE_INDEX
    if not loss.token_local:
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        nothing = torch.zeros(targets.shape, dtype=dtype, device=hidden.device)
        return _gradients(loss, mask, dict.fromkeys(loss.names, nothing))

    def of_rows(values: LMHeadOutput, rows: Tensor) -> Mapping[str, Tensor]:
        everywhere = {}
        for name in loss.names:
            some: Tensor = getattr(values, name)
            row = some.new_zeros(targets.numel()).index_copy_(0, rows, some)
            everywhere[name] = row.view(targets.shape)
        found = _gradients(loss, mask, everywhere)
        return {name: x.view(-1).index_select(0, rows) for name, x in found.items()}

    return of_rows


def _gradients(loss: ExpectedLoss, mask: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the loss in outputs of the head that have these values."""
    with torch.enable_grad(), torch.autocast(mask.device.type, enabled=False):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in values.items()}
        scored = without_last(LMHeadOutput(**leaves))
        scalar = loss.of(FusedCausalLMOutput(label_mask=mask, **per_token(scored)))
        found = torch.autograd.grad(scalar, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
