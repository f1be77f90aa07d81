"""Contrastive preference optimization, and SimPO, AlphaPO and their mixtures with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..compatibility import check_experimental
from ..removed_options import TrainerConfig
from .preferences import PairsWithoutLogits

check_experimental("cpo")

from trl.experimental import cpo as trl_cpo  # noqa: E402  # the gate comes first


@dataclass
class CPOConfig(TrainerConfig, trl_cpo.CPOConfig):
    """Settings of `trl.experimental.cpo.CPOConfig` and `lowpeak.MemoryConfig`."""


class CPOTrainer(PairsWithoutLogits, trl_cpo.CPOTrainer):
    """`trl.experimental.cpo.CPOTrainer` without logits: same arguments, same results."""

    pad_token_id: int
    cpo_alpha: float
    loss_type: str

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """As TRL's, with the mean logit (a scalar) in place of the chosen and rejected logits."""
        if self._handle is None:
            result: tuple[Tensor, ...] = super().concatenated_forward(model, batch)
            return result
        pairs = self._pairs(batch, self.pad_token_id)
        nll_labels = None if self.cpo_alpha == 0 else pairs.labels[: pairs.chosen]
        average = self.loss_type in ("ipo", "simpo")
        return self._score_pairs(model, pairs, nll_labels, average)
