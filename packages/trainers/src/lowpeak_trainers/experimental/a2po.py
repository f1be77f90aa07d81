"""A*-PO: policy optimization by regression onto the optimal advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..compatibility import check_experimental
from ..padding_free import IGNORE_INDEX
from ..removed_options import TrainerConfig
from .fused_log_probs import FusedLogProbs

check_experimental("a2po")

from trl.experimental import a2po as trl_a2po  # noqa: E402  # the gate comes first


@dataclass
class A2POConfig(TrainerConfig, trl_a2po.A2POConfig):
    """Settings of `trl.experimental.a2po.A2POConfig` and `lowpeak.MemoryConfig`."""


class A2POTrainer(FusedLogProbs, trl_a2po.A2POTrainer):
    """`trl.experimental.a2po.A2POTrainer` without logits: same arguments, same results."""

    def _get_sequence_logps(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Tensor:
        """Log-probabilities [B] of the last `logits_to_keep` tokens but for those masked."""
        if self._handle is None:
            result: Tensor = super()._get_sequence_logps(
                model, input_ids, attention_mask, logits_to_keep
            )
            return result
        labels = input_ids.masked_fill(attention_mask == 0, IGNORE_INDEX)
        labels[:, :-logits_to_keep] = IGNORE_INDEX
        output = self._fused(model, labels, input_ids=input_ids, attention_mask=attention_mask)
        assert output.log_probs is not None
        return output.log_probs.sum(1)
