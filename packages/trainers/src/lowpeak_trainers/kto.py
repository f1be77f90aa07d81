"""Kahneman-Tversky optimization."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .removed_options import TrainerConfig


@dataclass
class KTOConfig(TrainerConfig, trl.KTOConfig):
    """Settings of `trl.KTOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class KTOTrainer(LowpeakMixin, trl.KTOTrainer):
    """`trl.KTOTrainer` with the memory techniques of lowpeak: same arguments, same results."""
