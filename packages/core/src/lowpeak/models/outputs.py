"""What a causal LM with a fused head returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from lowpeak.lm_head import LMHeadOutput

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass
class FusedCausalLMOutput(ModelOutput):
    """Result of `model(..., labels=labels, fused_lm_head=True)`; TRL's protocol of the same name.

    Per-token fields are [batch, length - 1] ([batch, length] with `shift_labels`), 0 or False where
    the label is -100, and None unless they were asked for at installation. They are float32
    (float64 for a float64 model) but for the two masks.
    """

    loss: Tensor | None = None
    """Sum of the negative log-probabilities over `num_items_in_batch`, or over the number of labels
    where it was not given, plus the config's `router_aux_loss_coef` times `aux_loss`."""
    log_probs: Tensor | None = None
    """Log-probability of each label under the logits divided by the temperature."""
    entropy: Tensor | None = None
    """Entropy of the next token, in nats."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2 of the next token, without gradient."""
    mean_logits: Tensor | None = None
    """Mean over the vocabulary of the logits divided by the temperature, without gradient."""
    is_top1: Tensor | None = None
    """Whether the label is the most likely token."""
    label_mask: Tensor | None = None
    """Whether there is a label."""
    aux_loss: Tensor | None = None
    """Load balancing loss of a mixture of experts, when router logits were asked for."""


def per_token(scored: LMHeadOutput) -> dict[str, Tensor | None]:
    """The per-token fields of a FusedCausalLMOutput."""
    return {name: getattr(scored, name) for name in PER_TOKEN}


def without_last(scored: LMHeadOutput) -> LMHeadOutput:
    """Statistics [batch, length - 1] of [batch, length]: the last position predicts nothing."""
    return LMHeadOutput(*(None if x is None else x[:, :-1] for x in scored))
