"""Odds ratio preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..compatibility import check_experimental
from ..removed_options import TrainerConfig
from .preferences import PairsWithoutLogits

check_experimental("orpo")

from trl.experimental import orpo as trl_orpo  # noqa: E402  # the gate comes first


@dataclass
class ORPOConfig(TrainerConfig, trl_orpo.ORPOConfig):
    """Settings of `trl.experimental.orpo.ORPOConfig` and `lowpeak.MemoryConfig`."""


class ORPOTrainer(PairsWithoutLogits, trl_orpo.ORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer` without logits: same arguments, same results."""

    _positions_left_out = 1
    padding_value: int

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """As TRL's, with the mean logit (a scalar) in place of the chosen and rejected logits."""
        if self._handle is None:
            result: tuple[Tensor, ...] = super().concatenated_forward(model, batch)
            return result
        pairs = self._pairs(batch, self.padding_value)
        # the nll is that of prompt and completion
        return self._score_pairs(model, pairs, pairs.real_tokens[: pairs.chosen], average=True)
