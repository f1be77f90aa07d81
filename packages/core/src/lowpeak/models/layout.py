"""A fused call may be computed in another layout than its caller gave and wants back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SeveralCalls:
    """One fused call computed as several, one after another.

    Args:
        calls: arguments of the backbone and labels of each; each is laid out in its turn.
        join: makes the output of the one call of theirs, but for its loss.
    """

    calls: tuple[tuple[dict[str, Any], Tensor], ...]
    join: Callable[[Sequence[FusedCausalLMOutput]], FusedCausalLMOutput]


class BatchLayout(Protocol):
    """Rearranges the fused calls of a model, such as padded rows into one packed row."""

    def __call__(
        self, arguments: dict[str, Any], labels: Tensor
    ) -> Rearranged | SeveralCalls | None:
        """The call in another layout, or None to leave it as it is."""
        ...
