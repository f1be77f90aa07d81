"""The inner operators with a derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kept_ops import lm_head_unit_backward
from .ops import SAVED_NAMES, lm_head_backward, lm_head_forward, result_names
from .output import DIFFERENTIABLE_NAMES


class HeadCall(NamedTuple):
    """What is not a tensor in one call of the head."""

    scale: float
    softcap: float
    temperature: float
    compute_dtype: torch.dtype
    ignore_index: int | None
    outputs: int
    keep: tuple[bool, bool, bool]
    active: int | None
    skip_zero_rows: bool
    scratch_bytes: int | None
    backend: str

    @property
    def transform(self) -> tuple[float, float, float, torch.dtype, int | None]:
        """What every operator takes after its tensors."""
        return self[:5]


class FusedLMHead(torch.autograd.Function):
    """The head's outputs; every row's target is valid or `ignore_index`.

    The forward keeps gradients where `call.keep` says so, and the backward recomputes the logits
    where what was kept does not serve.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature_rows: Tensor | None,
        expected: Tensor | None,
        call: HeadCall,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        tensors = (hidden, weight, bias, targets, temperature_rows)
        names = result_names(call.outputs)
        results = lm_head_forward(
            *tensors,
            *call.transform,
            call.outputs,
            call.keep,
            [],
            call.active,
            call.scratch_bytes,
            call.backend,
        )
        results, kept = results[: len(names)], results[len(names) :]
        by_name = dict(zip(names, results, strict=True))
        saved = [by_name.get(name) for name in SAVED_NAMES]
        ctx.save_for_backward(*tensors, *saved, *kept)
        ctx.names = names
        ctx.call = call
        ctx.hidden_dtype = hidden.dtype
        constant = ("centre", "sum_exp", "is_top1")
        ctx.mark_non_differentiable(*(by_name[name] for name in constant if name in by_name))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        everything = ctx.saved_tensors
        tensors, saved, kept = everything[:5], everything[5:10], everything[10:]
        call: HeadCall = ctx.call
        given = dict(zip(ctx.names, upstream, strict=True))
        arriving = {name for name in DIFFERENTIABLE_NAMES if given.get(name) is not None}
        needs = ctx.needs_input_grad[:3]
        if kept and arriving <= unit_names(call.softcap):
            gradients = lm_head_unit_backward(
                kept[0],
                *tensors[1:],
                given.get("log_probs"),
                given.get("mean_logits"),
                call.scale,
                call.temperature,
                call.compute_dtype,
                ctx.hidden_dtype,
                call.ignore_index,
            )
        else:
            gradients = lm_head_backward(
                *tensors,
                saved,
                [given.get(name) for name in DIFFERENTIABLE_NAMES],
                *call.transform,
                call.skip_zero_rows,
                *needs,
                call.scratch_bytes,
                call.backend,
            )
        remaining = iter(gradients)
        return (*(next(remaining) if need else None for need in needs), *(None,) * 4)


def unit_names(softcap: float) -> set[str]:
    """The outputs whose gradient in hidden follows from that of log_probs without the logits."""
    return {"log_probs"} if softcap else {"log_probs", "mean_logits"}
