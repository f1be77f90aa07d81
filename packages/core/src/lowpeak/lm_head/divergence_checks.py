"""Argument checks of the divergences: everything that shapes and dtypes can tell."""

from __future__ import annotations

from torch import Tensor


def check_beta(beta: float) -> None:
    """Check which divergence is asked for.

    Raises:
        TypeError, ValueError: for anything but a number from 0 to 1.
    """
    if not isinstance(beta, (int, float)):
        raise TypeError(f"beta is {beta!r}: pass a number from 0 to 1")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: pass a number from 0 (forward KL) to 1 (reverse KL)")


def check_mask(mask: Tensor | None, hidden: Tensor) -> None:
    """Check which rows of `hidden` [..., H] count.

    Raises:
        TypeError, ValueError: for another type, dtype, shape or device.
    """
    rows = hidden.shape[:-1]
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is {mask!r}: pass a tensor or None")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask has dtype {mask.dtype}: pass a bool or integer one")
    if mask.shape != rows:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: pass {tuple(rows)}")
    if mask.device != hidden.device:
        raise ValueError(f"mask is on {mask.device} and the hidden states on {hidden.device}")


def check_same_rows(student: Tensor, teacher: Tensor) -> None:
    """Check what the hidden states of a student and a teacher must share.

    Raises:
        ValueError: for another shape or device.
    """
    if teacher.shape[:-1] != student.shape[:-1]:
        raise ValueError(
            f"teacher_hidden has shape {tuple(teacher.shape)} and student_hidden "
            f"{tuple(student.shape)}: all but their last dimensions must agree"
        )
    if teacher.device != student.device:
        raise ValueError(
            f"teacher_hidden is on {teacher.device} and student_hidden on {student.device}"
        )


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


def shared_vocabulary(student_weight: Tensor, teacher_weight: Tensor, vocabulary: str) -> int:
    """How many tokens are compared: those of both heads, or the first that both have.

    Raises:
        ValueError: for heads of different sizes unless vocabulary="shared".
    """
    if vocabulary not in ("same", "shared"):
        raise ValueError(f"vocabulary={vocabulary!r}: pass 'same' or 'shared'")
    sizes = (student_weight.size(0), teacher_weight.size(0))
    if vocabulary == "same" and sizes[0] != sizes[1]:
        raise ValueError(
            f"student_weight has {sizes[0]} rows and teacher_weight {sizes[1]}: their vocabularies "
            "differ. Where one tokenizer serves both and only the padding of the heads differs, "
            f"pass vocabulary='shared' to compare the first {min(sizes)} tokens"
        )
    return min(sizes)
