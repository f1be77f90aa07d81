"""An evaluation loss that is the mean over tokens, however they were batched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from .tile_evaluation import TileEvaluation


class TokenWeightedEvaluation(TileEvaluation):
    """Mixin: evaluate() and predict() weigh each batch by its targets where its loss is their mean.

    `Trainer` averages the means of the batches, so that its loss changes with the eval batch size
    (huggingface/transformers#39241). Such losses are those of batches with `labels`, as in SFT, and
    those whose trainer calls `note_targets`. A loss of the caller's own (`compute_loss_func`) is
    left alone, since nobody knows what it averages over. Rows that accelerate repeats to give
    every rank a whole last batch count as often as they are evaluated.
    """

    # Sum of the losses and number of targets since the evaluation began; None outside of it.
    _evaluated: tuple[float, int] | None = None
    _noted_targets: Tensor | None = None

    def note_targets(self, count: Tensor) -> None:
        """Tell that the loss being computed is the mean over `count` targets, an integer scalar."""
        self._noted_targets = count

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`; notes the loss and its number of targets."""
        self._forget_targets()
        hook = None
        if _has_labels(inputs) and not callable(self.compute_loss_func):
            hook = model.register_forward_hook(self._read_label_mask)
        try:
            loss, logits, labels = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            targets = self._noted_targets
        finally:
            if hook is not None:
                hook.remove()
        if self._evaluated is not None and targets is not None and loss is not None:
            self._add(loss.item(), int(targets))
        return loss, logits, labels

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As `Trainer.evaluation_loop`; puts the mean over targets into the metrics."""
        self._evaluated = (0.0, 0)
        try:
            output: Any = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            ranks = gather_object([self._evaluated])
        finally:
            self._evaluated = None
        targets = sum(count for _, count in ranks)
        name = f"{metric_key_prefix}_loss"
        if targets > 0 and name in output.metrics:
            output.metrics[name] = sum(total for total, _ in ranks) / targets
        return output

    def _forget_targets(self) -> None:
        self._noted_targets = None

    def _read_label_mask(self, model: nn.Module, args: Any, output: Any) -> None:
        # Also of TRL's own fused forward. A forward with logits has no such field.
        mask = output.get("label_mask") if isinstance(output, Mapping) else None
        if isinstance(mask, Tensor):
            self.note_targets(torch.count_nonzero(mask))

    def _add(self, loss: float, targets: int) -> None:
        assert self._evaluated is not None
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            return
        total, count = self._evaluated
        self._evaluated = (total + loss * targets, count + targets)


def _has_labels(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and isinstance(inputs.get("labels"), Tensor)
