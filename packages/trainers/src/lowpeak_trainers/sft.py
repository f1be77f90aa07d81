"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .removed_options import TrainerConfig


@dataclass
class SFTConfig(TrainerConfig, trl.SFTConfig):
    """Settings of `trl.SFTConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class SFTTrainer(LowpeakMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with the memory techniques of lowpeak: same arguments, same results."""
