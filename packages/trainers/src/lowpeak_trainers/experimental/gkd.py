"""Generalized knowledge distillation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor, nn

from ..compatibility import check_experimental
from ..fused_forward import why_head_is_off
from ..padding_free import IGNORE_INDEX
from ..removed_options import TrainerConfig
from ..teacher import ScoredByTeacher

check_experimental("gkd")

from trl.experimental import gkd as trl_gkd  # noqa: E402  # the gate comes first
from trl.models.utils import _ForwardRedirection  # noqa: E402

logger = logging.getLogger("lowpeak.trainers")

# TRL's loss ignores `GKDConfig.temperature`, which is that of the generation alone.
_TEMPERATURE = 1.0


@dataclass
class GKDConfig(TrainerConfig, trl_gkd.GKDConfig):
    """Settings of `trl.experimental.gkd.GKDConfig` and `lowpeak.MemoryConfig`."""


class GKDTrainer(ScoredByTeacher, trl_gkd.GKDTrainer):
    """`trl.experimental.gkd.GKDTrainer` with the divergence in tiles: same arguments and results.

    The cache of the allocator is not emptied after each step, since there are no logits in it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward_redirection = _ForwardRedirection()
        config = self._memory_config()
        self._logits_because = why_head_is_off(config) or self._why_no_hidden_states()
        off = self._logits_because
        state = "on" if off is None else f"off, by {off}; TRL's own is used"
        logger.info("fused divergence: %s in %s", state, type(self).__name__)
        self._arrange_teacher(config)

    def _why_no_hidden_states(self) -> str | None:
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
            return "prompt learning, whose virtual tokens the backbone does not know"
        return None

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
        return self._forward_redirection(model, unwrapped, self._loss, unwrapped, inputs, divisor)

    def _loss(self, unwrapped: Any, inputs: Mapping[str, Any], divisor: Tensor | int) -> Tensor:
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        divergence, _ = self._divergence(
            unwrapped, arguments, inputs["labels"], temperature=_TEMPERATURE
        )
        if isinstance(divisor, Tensor):
            divisor = divisor.to(divergence.device)
        return divergence.sum() / divisor
