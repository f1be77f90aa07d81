"""Which rows of a divergence count, and whether it is defined there: one host synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .rows import positions

_INFINITE = -float("inf")


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are not None, by name."""
    return {name: x for name, x in tensors.items() if x is not None}


def select_divergence_rows(
    mask: Tensor,
    temperatures: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    beta: float,
    expected: Tensor | None = None,
    further: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor | None, int]:
    """Indices of the rows where `mask` [N] is not 0, int64, and how many of them are active.

    Rows whose `expected` gradient [N] is 0 are not; they come last. None stands for all rows in
    their own order. `temperatures` [N] and `biases` [V] by argument name, those that are given.
    `further` is what else must be true, by the message for when it is not.

    Raises:
        ValueError: for a temperature that is not positive in a row that counts, a bias that masks
            every token, a KL divergence that is infinite, or what `further` says.
    """
    if mask.numel() == 0:
        return None, 0
    valid = mask != 0
    wanted = valid if expected is None else valid & (expected != 0)
    checks = _checks(valid, temperatures, biases, beta) | dict(further)
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
    mask: Tensor,
    temperatures: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    beta: float,
    further: Mapping[str, Tensor] = MappingProxyType({}),
) -> Tensor:
    """The mask of the rows that count, without a synchronisation: assertions on the device."""
    valid = mask != 0
    checks = _checks(valid, temperatures, biases, beta) | dict(further)
    for message, fine in checks.items():
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
