"""Inputs for the fused head, and the comparison of one call with the oracle."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lm_head_oracle import (
    DIFFERENTIABLE,
    IDENTITY,
    OUTPUTS,
    Evaluation,
    Transform,
    evaluate,
    random_upstream,
    top1_is_decided,
    transformed_logits,
)
from lm_head_tolerances import (
    gradient_tolerance,
    statistics_dtype,
    unit_in_last_place,
    value_tolerance,
)
from torch import Tensor

from lowpeak import LogitTransform, fused_lm_head


@dataclass(frozen=True)
class Case:
    """One set of inputs; hidden [..., H], weight [V, H], bias [V] or None, targets [...]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None = None
    transform: Transform = IDENTITY
    ignore_index: int = -100

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def leaves(self, frozen: Iterable[str] = ()) -> dict[str, Tensor]:
        """Fresh leaves of hidden, weight and bias that want gradients, but for the frozen ones."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {
            name: tensor.detach().clone().requires_grad_(name not in frozen)
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def to(self, dtype: torch.dtype) -> "Case":
        """The same inputs rounded to dtype."""
        return replace(
            self,
            hidden=self.hidden.to(dtype),
            weight=self.weight.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )


def make_case(
    rows: int | tuple[int, ...],
    vocabulary: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    bias: bool = True,
    ignored: float = 0.25,
    ignore_index: int = -100,
    logit_std: float = 3.0,
    transform: Transform = IDENTITY,
    seed: int = 0,
) -> Case:
    """Normal inputs whose logits have about the given standard deviation, made on the CPU."""
    shape = (rows,) if isinstance(rows, int) else rows
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * (logit_std / width**0.5)
    targets = torch.randint(vocabulary, shape, generator=generator)
    dropped = torch.rand(shape, generator=generator) < ignored
    return Case(
        hidden.to(device, dtype),
        weight.to(device, dtype),
        targets.masked_fill(dropped, ignore_index).to(device),
        torch.randn(vocabulary, generator=generator).to(device, dtype) if bias else None,
        transform,
        ignore_index,
    )


def exact_where_interpreted(factor: Tensor) -> Tensor:
    """A factor of a product that is to be bitwise the same for a row in any place.

    Triton's interpreter multiplies by the machine's BLAS, and what that makes of a row depends on
    its place (OpenBLAS on AMD Zen and Intel Haswell). So on a CPU it is in eighths: their products
    of some hundred terms are exact in float32, in any order.
    """
    return factor if factor.device.type != "cpu" else (8 * factor).round() / 8


def public_transform(transform: Transform) -> LogitTransform:
    """The transform as lowpeak's own class."""
    return LogitTransform(
        scale=transform.scale, softcap=transform.softcap, temperature=transform.temperature
    )


def call(case: Case, leaves: Mapping[str, Tensor], outputs: Sequence[str], **options: Any) -> Any:
    """fused_lm_head of a case on the given leaves."""
    return fused_lm_head(
        leaves["hidden"],
        leaves["weight"],
        case.targets,
        bias=leaves.get("bias"),
        transform=public_transform(case.transform),
        ignore_index=case.ignore_index,
        outputs=outputs,
        **options,
    )


def backward(result: Any, upstream: Mapping[str, Tensor], **options: Any) -> None:
    """Backward through several outputs at once."""
    torch.autograd.backward(
        [getattr(result, name) for name in upstream], list(upstream.values()), **options
    )


def run(
    case: Case,
    outputs: Sequence[str] = OUTPUTS,
    upstream: Mapping[str, Tensor] | None = None,
    frozen: Iterable[str] = (),
    **options: Any,
) -> Evaluation:
    """Outputs and gradients of fused_lm_head; checks that what was not asked for is None."""
    leaves = case.leaves(frozen)
    result = call(case, leaves, outputs, **options)
    for name in OUTPUTS:
        assert (getattr(result, name) is None) == (name not in outputs), name
    if upstream:
        backward(result, upstream)
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    values = {name: getattr(result, name).detach() for name in outputs}
    return Evaluation(values, {"bias": None, **gradients}, 0.0)


def upstream_for(case: Case, outputs: Sequence[str] = OUTPUTS, seed: int = 1) -> dict[str, Tensor]:
    """Random upstream gradients in the dtype of the statistics."""
    generator = torch.Generator().manual_seed(seed)
    dtype = statistics_dtype(case.hidden.dtype)
    return random_upstream(outputs, case.targets, generator, dtype)


def truth(case: Case, upstream: Mapping[str, Tensor] | None = None) -> Evaluation:
    """The oracle in float64."""
    return evaluate(
        case.hidden,
        case.weight,
        case.targets,
        case.bias,
        case.transform,
        ignore_index=case.ignore_index,
        upstream=upstream,
    )


def yardstick(
    case: Case, upstream: Mapping[str, Tensor] | None, compute_dtype: torch.dtype
) -> Evaluation:
    """Plain torch with logits of compute_dtype and float32 (float64) statistics."""
    return evaluate(
        case.hidden,
        case.weight,
        case.targets,
        case.bias,
        case.transform,
        ignore_index=case.ignore_index,
        upstream=upstream,
        logits_dtype=compute_dtype,
        dtype=statistics_dtype(compute_dtype),
    )


def assert_exact(
    case: Case,
    outputs: Sequence[str] = OUTPUTS,
    *,
    upstream: Mapping[str, Tensor] | None = None,
    frozen: Iterable[str] = (),
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> Evaluation:
    """fused_lm_head of the case is exact: outputs, gradients, and their dtypes."""
    compute_dtype = compute_dtype or case.hidden.dtype
    if upstream is None:
        upstream = upstream_for(case, outputs)
    ours = run(case, outputs, upstream, frozen, **options)
    assert_matches(case, ours, upstream, frozen, compute_dtype)
    return ours


def assert_matches(
    case: Case,
    ours: Evaluation,
    upstream: Mapping[str, Tensor],
    frozen: Iterable[str],
    compute_dtype: torch.dtype,
) -> None:
    """`ours` lies within the tolerances of the oracle of the case."""
    true, plain = truth(case, upstream), yardstick(case, upstream, compute_dtype)
    for name, value in ours.outputs.items():
        assert value.shape == case.targets.shape, name
        if name == "is_top1":
            assert value.dtype == torch.bool
            _assert_top1(case, value, true, compute_dtype)
            continue
        assert value.dtype == statistics_dtype(compute_dtype), (name, value.dtype)
        allowed = value_tolerance(
            error(plain.outputs[name], true.outputs[name]), true.largest_logit, compute_dtype
        )
        _assert_close(name, value, true.outputs[name], allowed)
    _assert_gradients(case, ours, true, plain, upstream, frozen, compute_dtype)


def _assert_gradients(
    case: Case,
    ours: Evaluation,
    true: Evaluation,
    plain: Evaluation,
    upstream: Mapping[str, Tensor],
    frozen: Iterable[str],
    compute_dtype: torch.dtype,
) -> None:
    operands = {"hidden": case.weight, "weight": case.hidden, "bias": case.weight.new_ones(1)}
    steepest = sum(largest(gradient) for gradient in upstream.values()) * _slope(case.transform)
    for name, operand in operands.items():
        gradient, expected = ours.gradients[name], true.gradients[name]
        leaf = getattr(case, name)
        if leaf is None or name in frozen or not upstream:
            assert gradient is None, name
            continue
        assert gradient is not None, name
        assert gradient.dtype == leaf.dtype, name
        assert gradient.shape == leaf.shape, name
        reference = plain.gradients[name]
        assert reference is not None
        allowed = gradient_tolerance(
            error(reference, expected),
            largest(expected),
            steepest * largest(operand),
            leaf.dtype,
            compute_dtype,
        )
        _assert_close(f"gradient of {name}", gradient, expected, allowed)


def _slope(transform: Transform) -> float:
    """The largest d z / d raw logit."""
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = float(temperature.min()) if temperature.numel() else 1.0
    return abs(transform.scale) / temperature


def _assert_top1(case: Case, value: Tensor, true: Evaluation, compute_dtype: torch.dtype) -> None:
    """is_top1 agrees wherever rounding of the logits cannot decide otherwise."""
    logits = transformed_logits(
        case.hidden.double(),
        case.weight.double(),
        None if case.bias is None else case.bias.double(),
        case.transform,
        torch.float64,
    )
    margin = 32 * unit_in_last_place(true.largest_logit, compute_dtype)
    decided = top1_is_decided(logits, margin) | (case.targets == case.ignore_index)
    assert torch.equal(value[decided], true.outputs["is_top1"][decided])


def _assert_close(name: str, value: Tensor, expected: Tensor, allowed: float) -> None:
    found = error(value, expected)
    assert found <= allowed, f"{name}: error {found:.3e}, allowed {allowed:.3e}"


def error(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; equal infinities do not differ, a NaN differs infinitely."""
    value, expected = value.double(), expected.double()
    difference = (value - expected).abs().masked_fill(value == expected, 0.0)
    return largest(difference.nan_to_num(nan=float("inf"), posinf=float("inf")))


def largest(tensor: Tensor) -> float:
    """max |tensor|, 0 when empty."""
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


ALL_TRANSFORMS = {
    "plain": Transform(),
    "scale": Transform(scale=0.5),
    "softcap": Transform(softcap=4.0),
    "temperature": Transform(temperature=0.7),
    "all": Transform(scale=-1.5, softcap=5.0, temperature=1.7),
}

__all__ = [
    "ALL_TRANSFORMS",
    "DIFFERENTIABLE",
    "OUTPUTS",
    "Case",
    "Transform",
    "assert_exact",
    "assert_matches",
    "backward",
    "call",
    "error",
    "largest",
    "make_case",
    "run",
    "truth",
    "upstream_for",
    "yardstick",
]
