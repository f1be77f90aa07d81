"""General online logit distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compatibility import check_experimental
from ..removed_options import TrainerConfig
from .divergence_loss import DivergenceLoss

check_experimental("gold")

from trl.experimental import gold as trl_gold  # noqa: E402  # the gate comes first


@dataclass
class GOLDConfig(TrainerConfig, trl_gold.GOLDConfig):
    """Settings of `trl.experimental.gold.GOLDConfig` and `lowpeak.MemoryConfig`."""


class GOLDTrainer(DivergenceLoss, trl_gold.GOLDTrainer):
    """`trl.experimental.gold.GOLDTrainer` with the divergence in tiles: same arguments and results.

    Universal logit distillation (`use_uld_loss=True`) keeps TRL's logits: it sorts and merges the
    distributions over two vocabularies. The cache of the allocator is not emptied after each step.
    """

    use_uld_loss: bool

    def _why_logits(self) -> str | None:
        if self.use_uld_loss:
            return "use_uld_loss=True, which sorts whole distributions"
        return super()._why_logits()

    def _further_arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        further: dict[str, Any] = self._get_model_forward_kwargs(inputs)
        return further
