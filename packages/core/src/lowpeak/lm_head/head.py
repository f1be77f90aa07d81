"""`fused_lm_head`: checks, row selection and autograd around the inner operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .checks import check_arguments
from .chunks import Keep, choose_keep
from .expected import AskedExpectation, ExpectedGrads, check_expected
from .function import FusedLMHead, HeadCall
from .gemm import product_dtype
from .low_rank import LowRank, check_low_rank, low_rank_factors
from .ops import output_flags, result_names
from .output import LMHeadOutput
from .rows import assert_rows, gathered, order_rows, placed
from .tiles import HeadInputs
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
    expected_grads: ExpectedGrads | None = None,
    low_rank: LowRank | Sequence[LowRank] | None = None,
) -> LMHeadOutput:
    """Per-token log-probabilities and statistics of a language model's head without its logits.

    The logits z = transform(hidden @ weight.T + bias) exist in tiles only. The backward recomputes
    them: 2 N V H operations forward, 2 more for each of recompute, gradient of hidden and gradient
    of weight. Nothing is computed for an input that needs no gradient, nor for a row without an
    upstream gradient.

    Where only `hidden` needs a gradient (a frozen head, as under LoRA), the forward keeps
    d log_prob / d hidden of each row, N H numbers in the dtype of `hidden` (float32 where the
    products are in another; twice that with log_normalizer among the outputs), and the backward
    scales the rows: 4 N V H in all. A gradient of entropy or log_sum_sq_probs takes the recompute,
    as does one of mean_logits under a soft cap: 8, or with `expected_grads` 4.
    After three backwards in a row that had one, nothing is kept any more (6), until
    `reset_expectations()`.

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
            (4 N H bytes), casts of `hidden` and the results come on top. What exceeds the default,
            where the backward is to recompute logits, holds those of the first rows until then.
        backend: "triton", "torch" or "auto".
        expected_grads: what d loss / d output of each row will be, up to one common factor, which
            takes the recompute away: 6 N V H in all, 4 with a frozen weight. A mapping of names
            among `outputs` to tensors with the shape of `targets`; an output that it does not name
            is expected to have no gradient. Or a function, called without grad mode for each chunk
            of rows with an LMHeadOutput of their outputs [c] and their indices [c] in the
            flattened `targets`, that returns a mapping to tensors [c], the same names every time.
            The backward accepts the expectation h for the gradients g that arrive when
            max|g - f h| <= 1e-6 max|g|, with f by least squares over all outputs together, and
            scales what the forward kept by f; otherwise it recomputes, exactly. So a loss scaled by
            a gradient scaler, an accumulation or a mean over processes holds, and a wrong
            expectation costs time and memory, never correctness. After 3 misses in a row
            expectations are not looked at again until `reset_expectations()`; see
            `expectation_counts()`. Rows whose expected gradients in a mapping are all exactly zero
            cost no more than their outputs. Both directions read one number on the host.

            From forward to backward the gradients of hidden (as for a frozen head), weight and bias
            (float32) are kept. An explicit `scratch_bytes` bounds the chunk and what the float32
            gradient of the weight takes; where it holds no chunk of all the vocabulary, the
            expectation is not used.

        low_rank: adapters on the head: the weight is weight + sum_i scale_i b_i @ a_i. That sum is
            never made, nor a gradient of a frozen `weight`. With R the sum of the ranks and a
            frozen `weight`, 6 N V H + 8 N V R operations in all; 4 N V H + 6 N V R with
            `expected_grads`. hidden @ a.T is computed in the wider dtype of the two (under autocast
            in that of autocast) and then multiplied with b in the dtype of the other products,
            which `hidden` and `weight` alone determine. A copy of `hidden` and, for several
            adapters, one [V, R] come on top of the scratch.

    Returns:
        LMHeadOutput of tensors with the shape of `targets`. All but is_top1 are differentiable in
        hidden, weight, bias and the factors of `low_rank`. A token masked by a bias of -inf
        receives no gradient.

    Raises:
        IndexError: a target is neither `ignore_index` nor in [0, V).
        ValueError, TypeError: an argument's shape, dtype, device or value; every token masked.
        RuntimeError: when the gradients are differentiated once more.
    """
    names = check_arguments(
        hidden, weight, targets, bias, transform, outputs, row_selection, scratch_bytes, backend
    )
    additions = check_low_rank(low_rank, hidden, weight)
    if expected_grads is not None:
        check_expected(expected_grads, names, row_selection, targets)
    shape, vocabulary = targets.shape, weight.size(0)
    targets = targets.reshape(-1)
    flat = hidden.reshape(-1, hidden.size(-1))
    compute_dtype = product_dtype(hidden, weight)
    statistics_dtype = torch.promote_types(compute_dtype, torch.float32)
    temperature = transform.temperature
    rows_temperature = None
    if isinstance(temperature, Tensor):
        rows_temperature, temperature = temperature.reshape(-1).to(statistics_dtype), 1.0
    constants = TileTransform(
        float(transform.scale), float(transform.softcap or 0.0), float(temperature)
    )
    narrow = [replace(addition, b=addition.b[:0]) for addition in additions]
    probe = low_rank_factors(flat[:0], narrow)
    inputs = HeadInputs(flat, weight, bias, None, constants, compute_dtype, low=probe)
    keep = choose_keep(inputs, names, expected_grads is not None, scratch_bytes, backend)
    expected: Tensor | None = None
    expected_names: tuple[str, ...] = ()
    if keep.phase == "expected" and isinstance(expected_grads, Mapping):
        expected_names = tuple(name for name in names if name in expected_grads)
        ordered = [expected_grads[name].detach().reshape(-1) for name in expected_names]
        expected = torch.stack([x.to(statistics_dtype) for x in ordered])

    rows: Tensor | None = None
    valid: Tensor | None = None
    active: int | None = None
    inner_ignore: int | None = None
    if row_selection == "all":
        valid, targets = assert_rows(targets, vocabulary, ignore_index, rows_temperature, bias)
    elif torch.compiler.is_compiling():
        inner_ignore = ignore_index
    else:
        busy = None if expected is None else (expected != 0).any(0)
        checked = (targets, vocabulary, ignore_index, rows_temperature, bias)
        rows, active = order_rows(*checked, busy)
        flat, targets = gathered(flat, rows), gathered(targets, rows)
        if rows_temperature is not None:
            rows_temperature = gathered(rows_temperature, rows)
        if expected is not None and rows is not None:
            expected = expected.index_select(1, rows)
        if keep.phase == "expected" and not active:
            keep, expected, expected_names = Keep(), None, ()
    if not torch.compiler.is_compiling():
        rows_with_gradients = flat if active is None else flat[:active]
        keep = keep.for_rows(replace(inputs, hidden=rows_with_gradients), backend, scratch_bytes)

    low = low_rank_factors(flat, additions) or (None, None)
    asked = None
    if keep.phase == "expected" and expected is None:
        assert callable(expected_grads)
        total = targets.size(0)
        asked = AskedExpectation(expected_grads, names, rows, total, statistics_dtype)
    call = HeadCall(
        constants.scale,
        constants.softcap,
        constants.temperature,
        compute_dtype,
        inner_ignore,
        output_flags(names),
        keep,
        expected_names,
        active,
        row_selection == "valid",
        scratch_bytes,
        backend,
    )
    values = FusedLMHead.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
        flat, weight, bias, targets, rows_temperature, *low, expected, call, asked
    )
    by_name = dict(zip(result_names(call.outputs), values, strict=False))
    return LMHeadOutput(
        **{name: placed(by_name[name], rows, valid, shape) for name in names},
    )
