"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .offloading import OffloadingConfig


@dataclass
class RLOOConfig(OffloadingConfig, trl.RLOOConfig):
    """Settings of `trl.RLOOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class RLOOTrainer(LowpeakMixin, trl.RLOOTrainer):
    """`trl.RLOOTrainer` with the memory techniques of lowpeak: same arguments, same results."""
