"""Group relative policy optimization."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from lowpeak.config import MemoryConfig

from .mixin import LowpeakMixin


@dataclass
class GRPOConfig(MemoryConfig, trl.GRPOConfig):
    """Settings of `trl.GRPOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class GRPOTrainer(LowpeakMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with the memory techniques of lowpeak: same arguments, same results."""
