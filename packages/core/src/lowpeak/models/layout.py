"""A fused call may be computed in another layout than its caller gave and wants back."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .outputs import FusedCausalLMOutput


class Rearranged(Protocol):
    """One fused call in another layout."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the backbone."""
        ...

    @property
    def labels(self) -> Tensor:
        """Labels of these arguments, [batch, length], -100 where there is nothing to score."""
        ...

    def restore(self, output: FusedCausalLMOutput) -> FusedCausalLMOutput:
        """The output in the layout of the original labels."""
        ...


class BatchLayout(Protocol):
    """Rearranges the fused calls of a model, such as padded rows into one packed row."""

    def __call__(self, arguments: dict[str, Any], labels: Tensor) -> Rearranged | None:
        """The call in another layout, or None to leave it as it is."""
        ...
