"""Autocast, mixed dtypes, and the dtypes of what comes back."""

from dataclasses import replace

import pytest
import torch
from lm_head_checks import (
    OUTPUTS,
    Case,
    Transform,
    assert_exact,
    assert_matches,
    backward,
    call,
    make_case,
    upstream_for,
)
from lm_head_oracle import Evaluation

CAPPED = Transform(softcap=8.0, temperature=0.8)


def autocast_run(
    case: Case, autocast: torch.dtype, device: torch.device
) -> tuple[Case, Evaluation, dict]:
    """Forward under autocast, backward outside (as training does); the case as autocast sees it."""
    leaves = case.leaves()
    upstream = upstream_for(case)
    with torch.autocast(torch.device(device).type, autocast):
        result = call(case, leaves, OUTPUTS)
    backward(result, upstream)
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.dtype == leaf.dtype, name
    values = {name: getattr(result, name).detach() for name in OUTPUTS}
    # The bias joins the logits in float32 and is not rounded.
    rounded = replace(case.to(autocast), bias=case.bias)
    gradients = {name: leaf.grad.to(getattr(rounded, name).dtype) for name, leaf in leaves.items()}
    return rounded, Evaluation(values, {"bias": None, **gradients}, 0.0), upstream


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16], ids=str)
def test_a11_autocast_with_fp32_weights(
    hidden: torch.dtype, bias: bool, autocast: torch.dtype, device: torch.device
) -> None:
    """Autocast computes in its dtype; statistics float32; gradients in the parameters' dtypes."""
    if hidden == torch.bfloat16 and autocast == torch.float16:
        pytest.skip("bfloat16 activations do not occur under float16 autocast")
    case = make_case((5, 7), 127, 20, device=device, transform=CAPPED, bias=bias)
    case = replace(case, hidden=case.hidden.to(hidden))
    rounded, ours, upstream = autocast_run(case, autocast, device)
    assert_matches(rounded, ours, upstream, (), autocast)


def test_a11_autocast_disabled_inside(device: torch.device) -> None:
    kind = torch.device(device).type
    case = make_case(9, 31, 8, device=device)
    with torch.autocast(kind, torch.bfloat16), torch.autocast(kind, enabled=False):
        assert_exact(case)


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16], ids=str)
def test_a11_mixed_dtypes_promote(
    hidden: torch.dtype, weight: torch.dtype, bias: torch.dtype, device: torch.device
) -> None:
    """Without autocast hidden and weight are promoted (fp32 head for RL), bias is not."""
    base = make_case((5, 7), 127, 20, device=device, transform=CAPPED)
    assert base.bias is not None
    case = replace(
        base, hidden=base.hidden.to(hidden), weight=base.weight.to(weight), bias=base.bias.to(bias)
    )
    assert_exact(case, compute_dtype=torch.promote_types(hidden, weight))


@pytest.mark.parametrize("mixed", ["hidden", "weight"])
def test_float64_with_float32_promotes(mixed: str, device: torch.device) -> None:
    case = make_case(9, 31, 8, torch.float64, device)
    case = replace(case, **{mixed: getattr(case, mixed).float()})
    assert_exact(case, compute_dtype=torch.float64)


@pytest.mark.parametrize("targets", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_integer_targets_either_work_or_are_refused(
    targets: torch.dtype, device: torch.device
) -> None:
    """The contract says int64. Another integer dtype must not give a silently different value."""
    case = make_case(9, 31, 8, device=device, ignored=0.0)
    other = replace(case, targets=case.targets.to(targets))
    expected = call(case, case.leaves(), ("log_probs",)).log_probs
    try:
        ours = call(other, case.leaves(), ("log_probs",)).log_probs
    except (TypeError, ValueError) as refusal:
        assert "targets" in str(refusal)  # noqa: PT017 (either outcome is right)
    else:
        assert torch.equal(ours, expected)


def test_autocast_leaves_float64_alone(device: torch.device) -> None:
    """As torch's own autocast does: float64 inputs are computed in float64."""
    case = make_case(9, 31, 8, torch.float64, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert_exact(case)
