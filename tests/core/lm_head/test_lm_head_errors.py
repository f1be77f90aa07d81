"""Wrong arguments: the error names the argument and the value. Empty and ignored batches."""

import re
from typing import Any

import pytest
import torch
from lm_head_checks import OUTPUTS, make_case, run, upstream_for

from lowpeak import LogitTransform, fused_lm_head


def arguments(device: torch.device, **changes: Any) -> dict[str, Any]:
    """Valid keyword arguments of fused_lm_head, with changes."""
    case = make_case(5, 11, 4, device=device)
    base = {
        "hidden": case.hidden,
        "weight": case.weight,
        "targets": case.targets,
        "bias": case.bias,
    }
    return {**base, **changes}


def test_valid_arguments_pass(device: torch.device) -> None:
    assert fused_lm_head(**arguments(device)).log_probs is not None


@pytest.mark.parametrize("value", [11, 12, -1, -99, -101, 2**31, 2**40, -(2**40)])
def test_target_out_of_range(value: int, device: torch.device) -> None:
    targets = torch.tensor([0, 1, -100, value, 2], device=device)
    with pytest.raises(IndexError, match=re.escape(str(value))) as caught:
        fused_lm_head(**arguments(device, targets=targets))
    assert "target" in str(caught.value)
    assert "11" in str(caught.value)


def test_minus_hundred_is_out_of_range_under_another_ignore_index(device: torch.device) -> None:
    targets = torch.tensor([0, 1, -100, -1, 2], device=device)
    with pytest.raises(IndexError, match="-100"):
        fused_lm_head(**arguments(device, targets=targets), ignore_index=-1)


@pytest.mark.parametrize(
    ("changes", "name", "kinds"),
    [
        ({"targets": torch.zeros(4, dtype=torch.int64)}, "targets", ValueError),
        ({"targets": torch.zeros(5, 1, dtype=torch.int64)}, "targets", ValueError),
        ({"targets": torch.zeros(5, dtype=torch.float32)}, "targets", (TypeError, ValueError)),
        ({"targets": torch.zeros(5, dtype=torch.bool)}, "targets", (TypeError, ValueError)),
        ({"targets": [0, 1, 2, 3, 4]}, "targets", TypeError),
        ({"hidden": torch.zeros(5, 3)}, "hidden|weight", ValueError),
        ({"hidden": torch.zeros(5, 4, dtype=torch.int64)}, "hidden", (TypeError, ValueError)),
        ({"hidden": torch.zeros(5, 4, dtype=torch.complex64)}, "hidden", (TypeError, ValueError)),
        ({"weight": torch.zeros(11)}, "weight", ValueError),
        ({"weight": torch.zeros(1, 11, 4)}, "weight", ValueError),
        ({"weight": torch.zeros(0, 4), "bias": None}, "weight", ValueError),
        ({"bias": torch.zeros(10)}, "bias", ValueError),
        ({"bias": torch.zeros(11, 1)}, "bias", ValueError),
        ({"bias": torch.zeros(11, dtype=torch.int64)}, "bias", (TypeError, ValueError)),
        ({"bias": 1.0}, "bias", TypeError),
        ({"outputs": ()}, "outputs", ValueError),
        ({"outputs": ("log_probs", "perplexity")}, "perplexity", ValueError),
        ({"outputs": "log_probs"}, "outputs", (TypeError, ValueError)),
        ({"row_selection": "some"}, "row_selection", ValueError),
        ({"backend": "cuda"}, "backend", ValueError),
        ({"scratch_bytes": 0}, "scratch_bytes", ValueError),
        ({"scratch_bytes": -1}, "scratch_bytes", ValueError),
        ({"scratch_bytes": 1}, "scratch_bytes", ValueError),
        ({"scratch_bytes": 1e6}, "scratch_bytes", TypeError),
        ({"hidden": torch.zeros(5, 0), "weight": torch.zeros(11, 0)}, "hidden|weight", ValueError),
        ({"transform": 0.7}, "transform", TypeError),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else None,
)
def test_bad_argument_is_named(
    changes: dict[str, Any], name: str, kinds: type | tuple[type, ...], device: torch.device
) -> None:
    moved = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in changes.items()
    }
    with pytest.raises(kinds, match=name):
        fused_lm_head(**arguments(device, **moved))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -30.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
        ({"temperature": torch.ones(5, requires_grad=True)}, "temperature"),
        ({"temperature": torch.ones(4)}, "temperature"),
        ({"temperature": torch.ones(5, dtype=torch.int64)}, "temperature"),
        ({"temperature": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])}, "temperature"),
        ({"temperature": torch.tensor([1.0, -2.0, 1.0, 1.0, 1.0])}, "temperature"),
    ],
    ids=str,
)
def test_bad_transform_is_named(fields: dict[str, Any], name: str, device: torch.device) -> None:
    """Raised by LogitTransform itself or by the first use of it."""
    fields = {
        key: value.to(device) if isinstance(value, torch.Tensor) and value.is_leaf and not
        value.requires_grad else value
        for key, value in fields.items()
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=name):
        fused_lm_head(**arguments(device, targets=torch.arange(5, device=device)),
                      transform=LogitTransform(**fields))  # fmt: skip


def test_transform_is_frozen() -> None:
    transform = LogitTransform()
    with pytest.raises(AttributeError):
        transform.scale = 2.0  # type: ignore[misc]
    assert (transform.scale, transform.softcap, transform.temperature) == (1.0, None, 1.0)


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("rows", [(0,), (0, 3), (3, 0), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",)], ids=str)
def test_d7_empty_or_ignored_batch_has_zero_gradients(
    rows: tuple[int, ...], frozen: tuple[str, ...], row_selection: str, device: torch.device
) -> None:
    """Outputs are zeros and every gradient is there, zero: DDP needs it to exist."""
    case = make_case(rows, 11, 4, device=device, ignored=1.1)
    assert (case.targets == -100).all()
    ours = run(case, OUTPUTS, upstream_for(case), frozen, row_selection=row_selection)
    for name, value in ours.outputs.items():
        assert value.shape == rows, name
        assert (value == 0).all(), name
    for name in ("hidden", "weight", "bias"):
        gradient = ours.gradients[name]
        if name in frozen:
            assert gradient is None
        else:
            assert gradient is not None, name
            assert gradient.shape == getattr(case, name).shape
            assert (gradient == 0).all(), name


def test_ignored_row_may_hold_rubbish(device: torch.device) -> None:
    """NaN in an ignored row (padding) reaches neither values nor gradients in "valid" mode."""
    case = make_case(8, 11, 4, device=device, ignored=0.0)
    case.targets[3] = -100
    clean = run(case, OUTPUTS, upstream_for(case))
    case.hidden[3] = float("nan")
    dirty = run(case, OUTPUTS, upstream_for(case))
    for name in OUTPUTS:
        assert torch.equal(clean.outputs[name], dirty.outputs[name]), name
    for name in ("hidden", "weight", "bias"):
        first, second = clean.gradients[name], dirty.gradients[name]
        assert torch.equal(first, second), name
