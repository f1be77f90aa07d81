"""`fused_lm_head`: checks, row selection and autograd around the inner operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import check_arguments
from .gemm import product_dtype
from .ops import (
    DIFFERENTIABLE_NAMES,
    SAVED_NAMES,
    lm_head_backward,
    lm_head_forward,
    output_flags,
    result_names,
)
from .output import LMHeadOutput
from .rows import assert_rows, placed, select_rows
from .transform import LogitTransform

_IDENTITY = LogitTransform()


def fused_lm_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = _IDENTITY,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("log_probs",),
    row_selection: str = "valid",
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> LMHeadOutput:
    """Per-token log-probabilities and statistics of a language model's head without its logits.

    The logits z = transform(hidden @ weight.T + bias) exist in tiles only. The backward recomputes
    them: 2 N V H operations forward, 2 more for each of recompute, gradient of hidden and gradient
    of weight. Nothing is computed for an input that needs no gradient.

    Args:
        hidden: [..., H], float64, float32, bfloat16 or float16, any strides.
        weight: [V, H]. Under autocast the products are computed in the autocast dtype, otherwise in
            the wider of the dtypes of `hidden` and `weight`.
        targets: [...] int64, the shape of `hidden` without its last dimension.
        bias: [V], added to the logits in float32; -inf masks a token.
        transform: scale, soft cap and temperature.
        ignore_index: rows with this target cost nothing and return 0.
        outputs: names among log_probs, entropy, log_sum_sq_probs, mean_logits, log_normalizer and
            is_top1.
        row_selection: "valid" skips ignored rows and checks the targets with one host
            synchronisation. "all" computes every row, never synchronises, asserts on the device and
            can be captured in a CUDA graph.
        scratch_bytes: bound of the bytes for tiles, casts and accumulators of a block; None is a
            default by device type. The float32 accumulator of a half-precision gradient of `hidden`
            (4 N H bytes), casts of `hidden` and the results come on top.
        backend: "triton", "torch" or "auto".

    Returns:
        LMHeadOutput of tensors with the shape of `targets`. All but is_top1 are differentiable in
        hidden, weight and bias. A token masked by a bias of -inf receives no gradient.

    Raises:
        IndexError: a target is neither `ignore_index` nor in [0, V).
        ValueError, TypeError: an argument's shape, dtype, device or value; every token masked.
        RuntimeError: when the gradients are differentiated once more.
    """
    names = check_arguments(
        hidden, weight, targets, bias, transform, outputs, row_selection, scratch_bytes, backend
    )
    shape, vocabulary = targets.shape, weight.size(0)
    flat_targets = targets.reshape(-1)
    flat_hidden = hidden.reshape(-1, hidden.size(-1))
    compute_dtype = product_dtype(hidden, weight)
    statistics_dtype = torch.promote_types(compute_dtype, torch.float32)
    temperature = transform.temperature
    rows_temperature = None
    if isinstance(temperature, Tensor):
        rows_temperature, temperature = temperature.reshape(-1).to(statistics_dtype), 1.0

    rows: Tensor | None = None
    valid: Tensor | None = None
    inner_ignore: int | None = None
    if row_selection == "all":
        valid, flat_targets = assert_rows(
            flat_targets, vocabulary, ignore_index, rows_temperature, bias
        )
    elif torch.compiler.is_compiling():
        inner_ignore = ignore_index
    else:
        rows = select_rows(flat_targets, vocabulary, ignore_index, rows_temperature, bias)
        if rows is not None:
            flat_hidden = flat_hidden.index_select(0, rows)
            flat_targets = flat_targets.index_select(0, rows)
            if rows_temperature is not None:
                rows_temperature = rows_temperature.index_select(0, rows)

    values = _FusedLMHead.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
        flat_hidden,
        weight,
        bias,
        flat_targets,
        rows_temperature,
        float(transform.scale),
        float(transform.softcap or 0.0),
        float(temperature),
        compute_dtype,
        inner_ignore,
        output_flags(names),
        scratch_bytes,
        backend,
    )
    by_name = dict(zip(result_names(output_flags(names)), values, strict=True))
    return LMHeadOutput(
        **{name: placed(by_name[name], rows, valid, shape) for name in names},
    )


class _FusedLMHead(torch.autograd.Function):
    """The inner operators with a derivative; every row's target is valid or `ignore_index`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature_rows: Tensor | None,
        scale: float,
        softcap: float,
        temperature: float,
        compute_dtype: torch.dtype,
        ignore_index: int | None,
        outputs: int,
        scratch_bytes: int | None,
        backend: str,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        transform = (scale, softcap, temperature, compute_dtype, ignore_index)
        results = lm_head_forward(
            hidden,
            weight,
            bias,
            targets,
            temperature_rows,
            *transform,
            outputs,
            scratch_bytes,
            backend,
        )
        names = result_names(outputs)
        by_name = dict(zip(names, results, strict=True))
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            temperature_rows,
            *(by_name.get(name) for name in SAVED_NAMES),
        )
        ctx.names = names
        ctx.transform = transform
        ctx.where = (scratch_bytes, backend)
        constant = ("centre", "sum_exp", "is_top1")
        ctx.mark_non_differentiable(*(by_name[name] for name in constant if name in by_name))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature_rows, *saved = ctx.saved_tensors
        by_name = dict(zip(ctx.names, upstream, strict=True))
        needs = ctx.needs_input_grad[:3]
        gradients = lm_head_backward(
            hidden,
            weight,
            bias,
            targets,
            temperature_rows,
            saved,
            [by_name.get(name) for name in DIFFERENTIABLE_NAMES],
            *ctx.transform,
            *needs,
            *ctx.where,
        )
        remaining = iter(gradients)
        return (*(next(remaining) if need else None for need in needs), *(None,) * 10)
