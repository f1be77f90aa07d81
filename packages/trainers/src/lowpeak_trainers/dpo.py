"""Direct preference optimization."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .mixin import LowpeakMixin
from .reference import ReferenceFirst
from .token_budget.config import TokenBudgetConfig


@dataclass
class DPOConfig(TokenBudgetConfig, trl.DPOConfig):
    """Settings of `trl.DPOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class DPOTrainer(ReferenceFirst, LowpeakMixin, trl.DPOTrainer):
    """`trl.DPOTrainer` with the memory techniques of lowpeak: same arguments, same results."""

    _reference_columns = ("ref_chosen_logps", "ref_rejected_logps")
