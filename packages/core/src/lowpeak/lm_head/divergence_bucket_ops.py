"""The inner operators of a divergence against a table: fixed schemas, as the other heads'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .divergence_buckets import BUCKET_NAMES, run_buckets_backward, run_buckets_forward
from .divergence_ops import head_inputs
from .refusals import double_backward_error


@torch.library.custom_op("lowpeak::buckets_forward", mutates_args=())
def buckets_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    transform: Sequence[float],
    compute_dtype: torch.dtype,
    ids: Tensor,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """What BUCKET_NAMES lists, of hidden [N, H] and tables `ids` [N, k]."""
    inputs = head_inputs((hidden, weight, bias, temperature), transform, compute_dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        results = run_buckets_forward(inputs.selected(None), ids, scratch_bytes, backend)
    return [results[name] for name in BUCKET_NAMES]


@buckets_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    transform: Sequence[float],
    compute_dtype: torch.dtype,
    ids: Tensor,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    dtype = torch.promote_types(compute_dtype, torch.float32)
    rows = [hidden.new_empty(hidden.size(0), dtype=dtype) for _ in BUCKET_NAMES[1:]]
    return [hidden.new_empty(ids.shape, dtype=dtype), *rows]


@torch.library.custom_op("lowpeak::buckets_backward", mutates_args=())
def buckets_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    transform: Sequence[float],
    compute_dtype: torch.dtype,
    ids: Tensor,
    saved: Sequence[Tensor],
    of_table: Tensor,
    of_rest: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    """Gradients of hidden, weight and bias, those that are needed; `saved` is the forward's."""
    inputs = head_inputs((hidden, weight, bias, temperature), transform, compute_dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = run_buckets_backward(
            inputs.selected(None),
            ids,
            dict(zip(BUCKET_NAMES, saved, strict=True)),
            (of_table, of_rest.contiguous()),
            (needs_hidden, needs_weight, needs_bias),
            scratch_bytes,
            backend,
        )
    return [x for x in gradients if x is not None]


@buckets_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    transform: Sequence[float],
    compute_dtype: torch.dtype,
    ids: Tensor,
    saved: Sequence[Tensor],
    of_table: Tensor,
    of_rest: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    scratch_bytes: int | None,
    backend: str,
) -> list[Tensor]:
    needed = ((hidden, needs_hidden), (weight, needs_weight), (bias, needs_bias))
    return [x.new_empty(x.shape) for x, need in needed if need and x is not None]


buckets_backward.register_autograd(double_backward_error("fused_top_k_divergence"))


class Buckets(torch.autograd.Function):
    """The operators with a derivative of table_logits and rest_log_sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor | None,
        transform: tuple[float, float, float],
        compute_dtype: torch.dtype,
        ids: Tensor,
        scratch_bytes: int | None,
        backend: str,
    ) -> tuple[Tensor, ...]:
        head = (hidden, weight, bias, temperature)
        results = buckets_forward(*head, transform, compute_dtype, ids, scratch_bytes, backend)
        ctx.save_for_backward(*head, ids, *results)
        ctx.options = (transform, compute_dtype)
        ctx.where = (scratch_bytes, backend)
        ctx.mark_non_differentiable(*results[2:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        head, ids, saved = ctx.saved_tensors[:4], ctx.saved_tensors[4], ctx.saved_tensors[5:]
        needs = ctx.needs_input_grad[:3]
        gradients = buckets_backward(
            *head, *ctx.options, ids, saved, *upstream[:2], *needs, *ctx.where
        )
        remaining = iter(gradients)
        return (*(next(remaining) if need else None for need in needs), *(None,) * 6)
