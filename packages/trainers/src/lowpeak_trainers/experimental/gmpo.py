"""Geometric-mean policy optimization."""

from __future__ import annotations

from dataclasses import dataclass

from ..compatibility import check_experimental
from ..mixin import LowpeakMixin
from ..removed_options import TrainerConfig

check_experimental("gmpo")

from trl.experimental import gmpo as trl_gmpo  # noqa: E402  # the gate comes first


@dataclass
class GMPOConfig(TrainerConfig, trl_gmpo.GMPOConfig):
    """Settings of `trl.experimental.gmpo.GMPOConfig` and `lowpeak.MemoryConfig`."""


class GMPOTrainer(LowpeakMixin, trl_gmpo.GMPOTrainer):
    """`trl.experimental.gmpo.GMPOTrainer`, a GRPOTrainer, with the memory techniques of lowpeak."""
