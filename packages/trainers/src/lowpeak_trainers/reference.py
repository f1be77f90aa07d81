"""The reference model runs before the policy, while no activations of the policy are alive.

TRL runs it in between, so that its peak holds the policy's activations and the reference's working
memory together. What is computed is the same, and taken in by the branch that the trainers have for
precomputed log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in


@contextmanager
def temporarily(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of `target` for a while."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


class ReferenceFirst(Trainer):
    """Mixin for trainers with `compute_ref_log_probs` and a branch for precomputed results."""

    # What `compute_ref_log_probs` returns, by the names of the precomputed columns.
    _reference_columns: ClassVar[tuple[str, ...]]
    precompute_ref_logps: bool
    ref_model: nn.Module | None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        parent: Any = super()
        # for image batches TRL's precomputation and its loss differ in what they give the model
        if self.precompute_ref_logps or "pixel_values" in inputs:
            return parent._compute_loss(model, inputs, return_outputs)
        trainer: Any = self
        reference = self.model if self.ref_model is None else self.ref_model
        computed = trainer.compute_ref_log_probs(reference, inputs)
        inputs = {**inputs, **dict(zip(self._reference_columns, computed, strict=True))}
        with temporarily(self, "precompute_ref_logps", True):
            return parent._compute_loss(model, inputs, return_outputs)


def join_rows(first: Tensor, second: Tensor) -> Tensor:
    """Rows of [B, S] and [C, T] under each other, [B + C, max(S, T)], zeros on the right."""
    width = max(first.size(1), second.size(1))
    return torch.cat([nn.functional.pad(x, (0, width - x.size(1))) for x in (first, second)])
