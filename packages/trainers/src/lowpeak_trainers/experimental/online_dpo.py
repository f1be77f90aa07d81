"""Direct preference optimization on the policy's own completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compatibility import check_experimental
from ..padding_free import IGNORE_INDEX
from ..removed_options import TrainerConfig
from ..use_cache import kept_use_cache
from .fused_log_probs import FusedLogProbs

check_experimental("online_dpo")

from trl.experimental import online_dpo as trl_online_dpo  # noqa: E402  # the gate comes first

_VISION = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")


@dataclass
class OnlineDPOConfig(TrainerConfig, trl_online_dpo.OnlineDPOConfig):
    """Settings of `trl.experimental.online_dpo.OnlineDPOConfig` and `lowpeak.MemoryConfig`."""


class OnlineDPOTrainer(FusedLogProbs, trl_online_dpo.OnlineDPOTrainer):
    """`trl.experimental.online_dpo.OnlineDPOTrainer` without logits: same arguments and results."""

    _metrics_over_padding = ("objective/kl", "objective/entropy", "objective/non_score_reward")
    max_length: int

    def _enable_gradient_checkpointing(self, model: Any, args: Any) -> Any:
        # TRL leaves use_cache=False in the config; KeepsUseCache writes it while training
        with kept_use_cache(model.config):
            return super()._enable_gradient_checkpointing(model, args)

    def _forward(
        self,
        model: nn.Module,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Log-probabilities [B, C] of the completions; without padding 0 behind their ends."""
        width, length = prompt_ids.size(1), completion_ids.size(1)
        kept = width if vision_inputs is not None else min(width, self.max_length - length)
        # without a prompt TRL takes each logit for that of its own token
        if self._handle is None or kept <= 0:
            result: Tensor = super()._forward(
                model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs
            )
            return result
        prompt_ids, prompt_mask = prompt_ids[:, -kept:], prompt_mask[:, -kept:]
        given = vision_inputs or {}
        arguments = {name: given[name] for name in _VISION if name in given}
        labels = completion_ids
        if self._layout.on:
            labels = labels.masked_fill(completion_mask == 0, IGNORE_INDEX)
        output = self._fused(
            model,
            torch.cat([torch.full_like(prompt_ids, IGNORE_INDEX), labels], dim=1),
            input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
            attention_mask=torch.cat([prompt_mask, completion_mask], dim=1),
            **arguments,
        )
        assert output.log_probs is not None
        return output.log_probs[:, -length:]
