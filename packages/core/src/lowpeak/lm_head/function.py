"""The inner operators with a derivative."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.logit_transform import TileTransform
from .chunks import Keep
from .expectation import FROZEN, expectation_counter
from .expected import AskedExpectation
from .kept_ops import lm_head_expected_backward, lm_head_unit_backward
from .low_rank_inputs import LowRankFactors
from .ops import SAVED_NAMES, lm_head_backward, lm_head_forward, result_names
from .output import DIFFERENTIABLE_NAMES
from .single_pass import ExpectedSource, run_single_pass
from .tiles import HeadInputs


class HeadCall(NamedTuple):
    """What is not a tensor in one call of the head.

    `expected`: the names of the expected gradients; `active`: how many rows, the first ones, have
    one that is not zero (None: unknown).
    """

    scale: float
    softcap: float
    temperature: float
    compute_dtype: torch.dtype
    ignore_index: int | None
    outputs: int
    keep: Keep
    expected: tuple[str, ...]
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
    where what was kept does not serve. `expected` [k, N] follows `call.expected`; `asked` stands in
    for it where a function is to be asked.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature_rows: Tensor | None,
        low_hidden: Tensor | None,
        low_weight: Tensor | None,
        expected: Tensor | None,
        call: HeadCall,
        asked: AskedExpectation | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        tensors = (hidden, weight, bias, targets, temperature_rows, low_hidden, low_weight)
        names = result_names(call.outputs)
        if asked is not None:
            results, expected, call = _ask(tensors, call, asked)
        else:
            results = lm_head_forward(
                *tensors,
                *call.transform,
                call.outputs,
                *call.keep,
                _listed(expected, call.expected),
                call.active,
                call.scratch_bytes,
                call.backend,
            )
        results, kept = results[: len(names)], results[len(names) :]
        by_name = dict(zip(names, results, strict=True))
        saved = [by_name.get(name) for name in SAVED_NAMES]
        if call.keep.phase == "frozen" and set(names) <= _never_recomputed(call):
            ctx.save_for_backward(None, *tensors[1:], *saved, expected, *kept)
        else:
            ctx.save_for_backward(*tensors, *saved, expected, *kept)
        ctx.names = names
        ctx.call = call
        ctx.hidden_dtype = hidden.dtype
        constant = ("centre", "sum_exp", "is_top1")
        ctx.mark_non_differentiable(*(by_name[name] for name in constant if name in by_name))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        everything = ctx.saved_tensors
        tensors, saved, kept = everything[:7], everything[7:12], everything[13:]
        call: HeadCall = ctx.call
        given = dict(zip(ctx.names, upstream, strict=True))
        arriving = {name for name in DIFFERENTIABLE_NAMES if given.get(name) is not None}
        needs = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
        ordered = [given.get(name) for name in DIFFERENTIABLE_NAMES]
        rest = (*call.transform, call.skip_zero_rows, *needs, call.scratch_bytes, call.backend)
        if call.expected:
            expected = _listed(everything[12], call.expected)
            gradients = lm_head_expected_backward(
                *tensors, saved, ordered, expected, call.keep.flags, kept, *rest
            )
        elif call.keep.phase == "frozen" and _serves(arriving, call):
            unit = kept[0]
            if torch.is_grad_enabled():  # so that a second differentiation comes upon the refusal
                unit = unit.detach().requires_grad_()
            gradients = lm_head_unit_backward(
                unit,
                kept[1] if call.keep.normalizer else None,
                *tensors[1:5],
                given.get("log_probs"),
                given.get("log_normalizer"),
                given.get("mean_logits"),
                call.scale,
                call.temperature,
                call.compute_dtype,
                ctx.hidden_dtype,
                call.ignore_index,
            )
        else:
            logits = kept[0] if call.keep.phase == "logits" else None
            gradients = lm_head_backward(*tensors, saved, ordered, logits, *rest)
        remaining = iter(gradients)
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, need in zip(_DIFFERENTIABLE, needs, strict=True):
            results[place] = next(remaining) if need else None
        return tuple(results)


# The arguments that have gradients, in the operators' order.
_DIFFERENTIABLE = (0, 1, 2, 5, 6)


def unit_names(call: HeadCall) -> set[str]:
    """The outputs whose gradients in hidden follow from what a frozen head keeps."""
    names = {"log_probs"}
    if not call.softcap:
        names.add("mean_logits")
    if call.keep.normalizer:
        names.add("log_normalizer")
    return names


def _serves(arriving: set[str], call: HeadCall) -> bool:
    """Whether the kept gradient of log_probs serves the upstream gradients; counted."""
    serves = arriving <= unit_names(call)
    if not torch.compiler.is_compiling():
        expectation_counter(FROZEN).record(serves)
    return serves


def _never_recomputed(call: HeadCall) -> set[str]:
    """Results that cannot make a backward recompute what the forward kept for log_probs."""
    return unit_names(call) | {"centre", "sum_exp", "is_top1"}


def _listed(expected: Tensor | None, names: tuple[str, ...]) -> list[Tensor | None]:
    """Expected gradients as the operators take them: by DIFFERENTIABLE_NAMES, or an empty list."""
    if expected is None:
        return []
    by_name = dict(zip(names, expected.unbind(0), strict=True))
    return [by_name.get(name) for name in DIFFERENTIABLE_NAMES]


def _ask(
    tensors: tuple[Tensor | None, ...],
    call: HeadCall,
    asked: AskedExpectation,
) -> tuple[list[Tensor], Tensor, HeadCall]:
    """The operator's forward in Python, since an operator cannot take a function."""
    hidden, weight, bias, targets, temperature_rows, *factors = tensors
    assert hidden is not None
    assert weight is not None
    assert targets is not None
    transform = TileTransform(*call.transform[:3])
    inputs = HeadInputs(
        hidden,
        weight,
        bias,
        temperature_rows,
        transform,
        call.compute_dtype,
        low=LowRankFactors.of(*factors),
    ).selected(None)
    names = result_names(call.outputs)
    with torch.autocast(hidden.device.type, enabled=False):
        results, kept = run_single_pass(
            inputs,
            targets.contiguous(),
            names,
            ExpectedSource(inputs, names, asked),
            call.keep,
            hidden.size(0),
            call.scratch_bytes,
            call.backend,
        )
    said = asked.ordered()
    call = call._replace(expected=tuple(said), active=hidden.size(0))
    return [*(results[name] for name in names), *kept], torch.stack([*said.values()]), call
