"""Group relative policy optimization."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .offloading import OffloadingConfig


@dataclass
class GRPOConfig(OffloadingConfig, trl.GRPOConfig):
    """Settings of `trl.GRPOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class GRPOTrainer(LowpeakMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with the memory techniques of lowpeak: same arguments, same results."""
