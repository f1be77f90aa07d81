"""Which rows of a divergence count, and whether it is defined there: one host synchronisation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .rows import positions

_INFINITE = -float("inf")


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are not None, by name."""
    return {name: x for name, x in tensors.items() if x is not None}


def check_expected_grads(expected: Tensor | None, rows: Tensor) -> None:
    """Check the expected gradients of the rows of `rows` [..., H].

    Raises:
        TypeError, ValueError: for another type, dtype, shape or device.
    """
    if expected is None:
        return
    if not isinstance(expected, Tensor):
        raise TypeError(f"expected_grads is {expected!r}: pass a tensor or None")
    if not expected.is_floating_point():
        raise TypeError(f"expected_grads has dtype {expected.dtype}: pass a floating-point one")
    if expected.shape != rows.shape[:-1]:
        raise ValueError(
            f"expected_grads has shape {tuple(expected.shape)}: pass {tuple(rows.shape[:-1])}, "
            "one for each row"
        )
    if expected.device != rows.device:
        raise ValueError(f"expected_grads is on {expected.device} and the rows on {rows.device}")


def select_divergence_rows(
    mask: Tensor,
    temperatures: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    beta: float,
    expected: Tensor | None = None,
) -> tuple[Tensor | None, int]:
    """Indices of the rows where `mask` [N] is not 0, int64, and how many of them are active.

    Rows whose `expected` gradient [N] is 0 are not; they come last. None stands for all rows in
    their own order. `temperatures` [N] and `biases` [V] by argument name, those that are given.

    Raises:
        ValueError: for a temperature that is not positive in a row that counts, a bias that masks
            every token, or a KL divergence that is infinite.
    """
    if mask.numel() == 0:
        return None, 0
    valid = mask != 0
    wanted = valid if expected is None else valid & (expected != 0)
    checks = _checks(valid, temperatures, biases, beta)
    count, active, *passed = torch.stack(
        [valid.sum(), wanted.sum(), *(check.long() for check in checks.values())]
    ).tolist()
    for message, fine in zip(checks, passed, strict=True):
        if count and not fine:
            raise ValueError(message)
    if active not in (0, count):
        return torch.cat(
            [positions(wanted, active), positions(valid & ~wanted, count - active)]
        ), active
    return None if count == mask.numel() else positions(valid, count), active


def assert_divergence_rows(
    mask: Tensor, temperatures: Mapping[str, Tensor], biases: Mapping[str, Tensor], beta: float
) -> Tensor:
    """The mask of the rows that count, without a synchronisation: assertions on the device."""
    valid = mask != 0
    for message, fine in _checks(valid, temperatures, biases, beta).items():
        torch._assert_async(fine | ~valid.any(), message)
    return valid


def _checks(
    valid: Tensor, temperatures: Mapping[str, Tensor], biases: Mapping[str, Tensor], beta: float
) -> dict[str, Tensor]:
    """What must be true, by the message for when it is not."""
    checks = {
        f"{name} must be positive in every row that counts": (~valid | (temperature > 0)).all()
        for name, temperature in temperatures.items()
    }
    for name, bias in biases.items():
        message = f"{name} is -inf everywhere: no token of the vocabulary has a finite logit"
        checks[message] = (bias > _INFINITE).any()
    if beta in (0.0, 1.0):
        names = (
            ("student_bias", "teacher_bias") if beta == 0.0 else ("teacher_bias", "student_bias")
        )
        narrow, wide = (biases.get(name) for name in names)
        if narrow is not None:
            allowed = (
                torch.ones_like(narrow, dtype=torch.bool) if wide is None else wide > _INFINITE
            )
            message = (
                f"{names[0]} is -inf for tokens that the other head allows: the KL divergence is "
                "infinite. Mask them in both heads, or take 0 < beta < 1"
            )
            checks[message] = ((narrow > _INFINITE) | ~allowed).all()
    return checks
