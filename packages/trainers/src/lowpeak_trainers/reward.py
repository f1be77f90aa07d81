"""Reward models, trained on preferences."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .token_budget.config import TokenBudgetConfig


@dataclass
class RewardConfig(TokenBudgetConfig, trl.RewardConfig):
    """Settings of `trl.RewardConfig` and `lowpeak.MemoryConfig`, all on the command line."""


class RewardTrainer(LowpeakMixin, trl.RewardTrainer):
    """`trl.RewardTrainer` with the memory techniques of lowpeak: same arguments, same results.

    A reward model scores a sequence with one number, so there are no logits to save. Its backbone
    sees the sequences of a batch as documents of one packed row (`packed_scores`).
    """
