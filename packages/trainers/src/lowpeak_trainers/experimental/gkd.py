"""Generalized knowledge distillation."""

from __future__ import annotations

from dataclasses import dataclass

from ..compatibility import check_experimental
from ..removed_options import TrainerConfig
from .divergence_loss import DivergenceLoss

check_experimental("gkd")

from trl.experimental import gkd as trl_gkd  # noqa: E402  # the gate comes first


@dataclass
class GKDConfig(TrainerConfig, trl_gkd.GKDConfig):
    """Settings of `trl.experimental.gkd.GKDConfig` and `lowpeak.MemoryConfig`."""


class GKDTrainer(DivergenceLoss, trl_gkd.GKDTrainer):
    """`trl.experimental.gkd.GKDTrainer` with the divergence in tiles: same arguments and results.

    The cache of the allocator is not emptied after each step, since there are no logits in it.
    """

    @property
    def _divergence_temperature(self) -> float:
        # TRL's loss ignores GKDConfig.temperature, which is that of the generation alone
        return 1.0
