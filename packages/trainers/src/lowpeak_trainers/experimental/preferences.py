"""Chosen and rejected sequences in one forward, scored without logits: what ORPO and CPO share."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..padding_free import IGNORE_INDEX
from .fused_log_probs import FusedLogProbs
from .mean_logits import HiddenStates, mean_logits


@dataclass(frozen=True)
class Pairs:
    """Chosen sequences, then rejected ones.

    Args:
        tokens: [2 B, S].
        attention_mask: [2 B, S], 0 at padding.
        labels: [2 B, S], the tokens of the completions, -100 elsewhere.
        chosen: B.
    """

    tokens: Tensor
    attention_mask: Tensor
    labels: Tensor
    chosen: int

    def halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of values [2 B, ...] those of the chosen and those of the rejected sequences."""
        return values[: self.chosen], values[self.chosen :]

    @property
    def real_tokens(self) -> Tensor:
        """The tokens of prompts and completions, -100 at padding."""
        return torch.where(self.attention_mask == 1, self.tokens, IGNORE_INDEX)


class PairsWithoutLogits(FusedLogProbs):
    """Mixin for trainers with `concatenated_forward`."""

    _metrics_over_padding = ("logits/chosen", "logits/rejected")
    # How many positions at the end of each sequence TRL leaves out of these metrics.
    _positions_left_out: ClassVar[int] = 0

    aux_loss_enabled: bool
    concatenated_inputs: Any

    @property
    def _head_outputs(self) -> tuple[str, ...]:
        # without padding they are those of the positions before the completions, as in DPO
        return ("log_probs", "mean_logits") if self._layout.on else ("log_probs",)

    def _pairs(self, batch: dict[str, Any], padding: int) -> Pairs:
        joined = self.concatenated_inputs(
            batch, padding_value=padding, device=self.accelerator.device
        )
        names = ("input_ids", "attention_mask", "labels")
        tokens, mask, labels = (joined[f"concatenated_{name}"] for name in names)
        return Pairs(tokens, mask, labels, batch["chosen_labels"].shape[0])

    def _score_pairs(
        self, model: nn.Module, pairs: Pairs, nll_labels: Tensor | None, average: bool
    ) -> tuple[Tensor, ...]:
        """What `concatenated_forward` returns, with the mean of the logits in place of each.

        Args:
            model: the policy, as the trainer has wrapped it.
            pairs: the batch.
            nll_labels: [B, S], what the nll of the chosen sequences is the mean over, -100
                elsewhere; None for no nll.
            average: mean of the log-probabilities of a completion, not their sum.
        """
        scored = pairs.labels
        if nll_labels is not None:
            chosen, rejected = pairs.halves(scored)
            chosen = torch.where(chosen == IGNORE_INDEX, nll_labels, chosen)
            scored = torch.cat([chosen, rejected])
        arguments = {"output_router_logits": True} if self.aux_loss_enabled else {}
        hidden = HiddenStates(self._plain(model))
        with nullcontext() if self._layout.on else hidden.recorded():
            output = self._fused(
                model,
                scored,
                input_ids=pairs.tokens,
                attention_mask=pairs.attention_mask,
                **arguments,
            )
        assert output.log_probs is not None
        log_probs = output.log_probs
        completions = _counted(pairs.labels, log_probs)
        sequences = (log_probs * completions).sum(1)
        if average:
            sequences = sequences / completions.sum(1)
        nll = log_probs.new_zeros(())
        if nll_labels is not None:
            nll = -_mean(log_probs[: pairs.chosen], _counted(nll_labels, log_probs))
        if self._layout.on:
            assert output.mean_logits is not None
            logits, counted = (pairs.halves(x) for x in (output.mean_logits, completions))
            means = tuple(map(_mean, logits, counted))
        else:
            means = self._mean_logits(model, pairs, hidden)
        result = (*pairs.halves(sequences), *means, nll)
        if not self.aux_loss_enabled:
            return result
        assert output.aux_loss is not None
        return (*result, output.aux_loss)

    def _mean_logits(
        self, model: nn.Module, pairs: Pairs, recorded: HiddenStates
    ) -> tuple[Tensor, ...]:
        """Mean logit of the chosen and of the rejected sequences, over the positions TRL takes."""
        plain, handle = self._plain(model), self._handle
        assert handle is not None
        hidden = recorded.of(handle.fused.route(plain, pairs.labels).backbone_name)
        hidden = hidden[:, : hidden.size(1) - self._positions_left_out]
        scratch = self._memory_config().lm_head_scratch_bytes
        return mean_logits(plain, handle, pairs.halves(hidden), pairs.labels, scratch)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return (values * counted).sum() / counted.sum()


def _counted(labels: Tensor, log_probs: Tensor) -> Tensor:
    return (labels[:, 1:] != IGNORE_INDEX).to(log_probs.device)
