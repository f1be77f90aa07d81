"""Kahneman-Tversky optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl
from torch import Tensor, nn

from .mixin import LowpeakMixin
from .reference import ReferenceFirst, join_rows, temporarily
from .token_budget.config import TokenBudgetConfig


@dataclass
class KTOConfig(TokenBudgetConfig, trl.KTOConfig):
    """Settings of `trl.KTOConfig` and `lowpeak.MemoryConfig`, all of them on the command line."""


class KTOTrainer(ReferenceFirst, LowpeakMixin, trl.KTOTrainer):
    """`trl.KTOTrainer` with the memory techniques of lowpeak: same arguments, same results."""

    _reference_columns = ("ref_logps", "ref_KL_logps")
    calculate_KL: bool

    def compute_ref_log_probs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """As TRL's, with the completions and their KL counterparts in one forward, not two."""
        if not self.calculate_KL or "pixel_values" in inputs:
            computed: tuple[Tensor, Tensor | None] = super().compute_ref_log_probs(model, inputs)
            return computed
        # padding may hold any token: it is masked, and so is its label
        joined = {
            name: join_rows(inputs[name], inputs[f"KL_{name}"])
            for name in ("input_ids", "attention_mask", "completion_mask")
        }
        with temporarily(self, "calculate_KL", False):
            log_probs, _ = super().compute_ref_log_probs(model, joined)
        completions = inputs["input_ids"].size(0)
        return log_probs[:completions], log_probs[completions:]
