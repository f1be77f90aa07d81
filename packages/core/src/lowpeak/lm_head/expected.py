"""`expected_grads` of a call: its checks, and a caller's function asked chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .output import DIFFERENTIABLE_NAMES, LMHeadOutput

ExpectedGrads = Mapping[str, Tensor] | Callable[[LMHeadOutput, Tensor], Mapping[str, Tensor]]


def check_expected(
    expected: ExpectedGrads, names: tuple[str, ...], row_selection: str, targets: Tensor
) -> None:
    """Check what can be checked before the pass.

    Raises:
        TypeError, ValueError: with what it is and what it should be.
    """
    if row_selection == "all":
        raise ValueError(
            "expected_grads needs row_selection='valid': the backward reads on the host whether "
            "the expectation held, which row_selection='all' promises not to do"
        )
    if isinstance(expected, Mapping):
        check_values(expected, names, targets)
    elif not callable(expected):
        raise TypeError(
            f"expected_grads is {expected!r}: pass a mapping of output names to tensors, or a "
            "function that returns one"
        )
    elif torch.compiler.is_compiling():
        raise ValueError(
            "expected_grads is a function, which torch.compile cannot put into its graph: pass a "
            "mapping of output names to tensors"
        )


def check_values(expected: Mapping[str, Tensor], names: tuple[str, ...], like: Tensor) -> None:
    """Check expected gradients of the rows of `like`.

    Raises:
        TypeError, ValueError: with the name, what it is and what it should be.
    """
    possible = [name for name in names if name in DIFFERENTIABLE_NAMES]
    unknown = [name for name in expected if name not in possible]
    if unknown or not expected:
        raise ValueError(
            f"expected_grads names {tuple(expected)!r}: pass gradients of the outputs asked for, "
            f"{tuple(possible)!r}"
        )
    for name, value in expected.items():
        label = f"expected_grads[{name!r}]"
        if not isinstance(value, Tensor):
            raise TypeError(f"{label} is {value!r}: pass a tensor")
        if not value.is_floating_point():
            raise TypeError(f"{label} has dtype {value.dtype}: pass a floating-point one")
        if value.shape != like.shape:
            raise ValueError(
                f"{label} has shape {tuple(value.shape)}: pass {tuple(like.shape)}, "
                "one for each row"
            )
        if value.device != like.device:
            raise ValueError(f"{label} is on {value.device}: pass one on {like.device}")


class AskedExpectation:
    """A caller's function, asked for each chunk; remembers what it said.

    `rows`: where the rows are among all, None for everywhere.
    """

    def __init__(
        self,
        function: Callable[[LMHeadOutput, Tensor], Mapping[str, Tensor]],
        names: tuple[str, ...],
        rows: Tensor | None,
        total: int,
        dtype: torch.dtype,
    ) -> None:
        self._function = function
        self._names = names
        self._rows = rows
        self._total = total
        self._dtype = dtype
        self.said: dict[str, Tensor] = {}

    def __call__(
        self, outputs: Mapping[str, Tensor], first: int, last: int
    ) -> Mapping[str, Tensor]:
        given = {name: outputs[name] for name in self._names}
        device = outputs["log_probs"].device
        index = torch.arange(first, last, device=device)
        if self._rows is not None:
            index = self._rows[first:last]
        answer = self._function(LMHeadOutput(**given), index)
        if not isinstance(answer, Mapping):
            raise TypeError(f"expected_grads returned {answer!r}: return a mapping of tensors")
        check_values(answer, self._names, index)
        for name, value in answer.items():
            if name not in self.said:
                self.said[name] = torch.zeros(self._total, dtype=self._dtype, device=device)
            self.said[name][first:last] = value.detach()
        # an expanded number has no element a row, which is what kernels read
        return {name: value.detach().to(self._dtype).contiguous() for name, value in answer.items()}

    def ordered(self) -> dict[str, Tensor]:
        """What was said for all rows, in the order of DIFFERENTIABLE_NAMES."""
        return {name: self.said[name] for name in DIFFERENTIABLE_NAMES if name in self.said}
