"""Direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .removed_options import TrainerConfig


@dataclass
class DPOConfig(TrainerConfig, trl.DPOConfig):
    """Settings of `trl.DPOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class DPOTrainer(LowpeakMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with the memory techniques of lowpeak: same arguments, same results."""
