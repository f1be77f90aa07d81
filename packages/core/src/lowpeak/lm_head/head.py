"""`fused_lm_head`: checks, row selection and autograd around the inner operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .checks import check_arguments
from .chunks import single_pass_serves
from .function import FusedLMHead, HeadCall
from .gemm import product_dtype
from .ops import output_flags, result_names
from .output import LMHeadOutput
from .rows import assert_rows, placed, select_rows
from .tiles import HeadInputs, use_triton
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
        rows, _ = select_rows(flat_targets, vocabulary, ignore_index, rows_temperature, bias)
        if rows is not None:
            flat_hidden = flat_hidden.index_select(0, rows)
            flat_targets = flat_targets.index_select(0, rows)
            if rows_temperature is not None:
                rows_temperature = rows_temperature.index_select(0, rows)

    transform_constants = (float(transform.scale), float(transform.softcap or 0.0), temperature)
    keep = (False, False, False)
    frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    if torch.is_grad_enabled() and hidden.requires_grad and frozen and "log_probs" in names:
        inputs = HeadInputs(flat_hidden, weight, bias, None, TileTransform(), compute_dtype)
        needs = (True, False, False)
        if single_pass_serves(inputs, needs, use_triton(backend, inputs), "frozen", scratch_bytes):
            keep = needs
    call = HeadCall(
        *transform_constants,
        compute_dtype,
        inner_ignore,
        output_flags(names),
        keep,
        None,
        row_selection == "valid",
        scratch_bytes,
        backend,
    )
    values = FusedLMHead.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
        flat_hidden, weight, bias, flat_targets, rows_temperature, None, call
    )
    by_name = dict(zip(result_names(call.outputs), values, strict=False))
    return LMHeadOutput(
        **{name: placed(by_name[name], rows, valid, shape) for name in names},
    )
