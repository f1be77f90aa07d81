"""The divergence from a teacher in place of two batches of logits: what GKD and GOLD share."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.models.utils import _ForwardRedirection

from ..fused_forward import why_head_is_off
from ..padding_free import IGNORE_INDEX
from ..teacher import ScoredByTeacher

logger = logging.getLogger("lowpeak.trainers")


class DivergenceLoss(ScoredByTeacher):
    """Mixin for trainers whose `compute_loss` takes a divergence between logits.

    Unlike TRL's they do not empty the allocator's cache after each step: no logits are in it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward_redirection = _ForwardRedirection()
        config = self._memory_config()
        off = self._logits_because = why_head_is_off(config) or self._why_logits()
        state = "on" if off is None else f"off, by {off}; TRL's own is used"
        logger.info("fused divergence: %s in %s", state, type(self).__name__)
        self._arrange_teacher(config)

    @property
    def _divergence_temperature(self) -> float:
        return self.temperature

    def _why_logits(self) -> str | None:
        """What needs the logits themselves, or None."""
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
            return "prompt learning, whose virtual tokens the backbone does not know"
        return None

    def _further_arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What both models are called with beside tokens and padding mask."""
        return {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As TRL's, which also computes it where the outputs are asked for: they are logits."""
        count = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        self.note_targets(count)
        if return_outputs or self._logits_because is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        unwrapped = self.accelerator.unwrap_model(model)
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        # by way of the wrapper's forward, in which FSDP and DeepSpeed gather the weights
        return self._forward_redirection(model, unwrapped, self._loss, unwrapped, inputs, divisor)

    def _loss(self, unwrapped: Any, inputs: dict[str, Any], divisor: Tensor | int) -> Tensor:
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        divergence, _ = self._divergence(
            unwrapped,
            {**arguments, **self._further_arguments(inputs)},
            inputs["labels"],
            temperature=self._divergence_temperature,
        )
        if isinstance(divisor, Tensor):
            divisor = divisor.to(divergence.device)
        return divergence.sum() / divisor
