"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from lowpeak.config import MemoryConfig

from .mixin import LowpeakMixin


@dataclass
class SFTConfig(MemoryConfig, trl.SFTConfig):
    """Settings of `trl.SFTConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class SFTTrainer(LowpeakMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` with the memory techniques of lowpeak: same arguments, same results."""
