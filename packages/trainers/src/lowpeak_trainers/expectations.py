"""What a trainer's loss makes of its tokens, for heads that make gradients in their forward.

Up to one factor of the whole call, which is why gradient accumulation, gradient scalers and counts
of tokens do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lowpeak.models import SUM_OF_LOG_PROBS, ExpectedLoss, FusedCausalLMOutput

from .loss_replay import grpo_loss

# An expectation, or why there is none.
Expectation = ExpectedLoss | str

# DPO losses of the margin between the sums of a pair's log-probabilities, and between their means.
_OF_SUMS = {"sigmoid", "hinge", "exo_pair", "robust", "discopop", "aot", "aot_unpaired"}
_OF_MEANS = {"ipo", "sigmoid_norm"}


def _log_probs(output: FusedCausalLMOutput, length: int) -> Tensor:
    """[batch, length]: prompt learning puts virtual tokens in front."""
    assert output.log_probs is not None
    return output.log_probs[:, -length:]


def _sft(trainer: Any, inputs: Mapping[str, Any]) -> Expectation:
    if trainer.args.loss_type == "nll":
        return SUM_OF_LOG_PROBS
    if trainer.args.loss_type == "dft":

        def dft(output: FusedCausalLMOutput) -> Tensor:
            assert output.log_probs is not None
            return (output.log_probs * output.log_probs.exp().detach()).sum()

        return ExpectedLoss(dft, token_local=True)
    return f"nothing is known of loss_type={trainer.args.loss_type!r}"


def _dpo(trainer: Any, inputs: Mapping[str, Any]) -> Expectation:
    pairs = inputs["input_ids"].size(0) // 2
    if pairs != 1:
        return f"the gradients of {pairs} pairs in a batch follow from the loss only"
    if trainer.ld_alpha is not None or trainer.f_divergence_type != "reverse_kl":
        return "ld_alpha or f_divergence_type weigh chosen and rejected tokens differently"
    types = set(trainer.loss_types)
    if not (types <= _OF_SUMS or types <= _OF_MEANS):
        return f"loss_type={sorted(types)} weighs chosen and rejected tokens differently"

    def margin(output: FusedCausalLMOutput) -> Tensor:
        chosen, rejected = _log_probs(output, inputs["input_ids"].size(1) - 1).sum(1).unbind(0)
        if types <= _OF_MEANS:
            lengths = inputs["completion_mask"].sum(1).clamp(min=1)
            chosen, rejected = chosen / lengths[0], rejected / lengths[1]
        return chosen - rejected

    return ExpectedLoss(margin)


def _kto(trainer: Any, inputs: Mapping[str, Any]) -> Expectation:
    if trainer.loss_type not in ("kto", "apo_zero_unpaired"):
        return f"nothing is known of loss_type={trainer.loss_type!r}"
    sequences = inputs["input_ids"].size(0)
    if sequences != 1:
        return f"the gradients of {sequences} sequences in a batch follow from the loss only"
    return SUM_OF_LOG_PROBS


def _rloo(trainer: Any, inputs: Mapping[str, Any]) -> Expectation:
    sequences = inputs["completion_ids"].size(0)
    period = trainer.args.steps_per_generation * trainer.num_iterations
    on_policy = trainer._step % period < trainer.args.gradient_accumulation_steps
    if sequences != 1 and not on_policy:
        return "off policy, the gradients of a batch's sequences follow from the loss only"

    def weighted(output: FusedCausalLMOutput) -> Tensor:
        log_probs = _log_probs(output, inputs["completion_ids"].size(1))
        sums: Tensor = (log_probs * inputs["completion_mask"]).sum(1)
        advantages: Tensor = inputs["advantages"]
        return (advantages * sums).sum()

    return ExpectedLoss(weighted)


def _grpo(trainer: Any, inputs: Mapping[str, Any]) -> Expectation:
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile takes a quantile over all tokens"
    on_policy = inputs.get("old_per_token_logps") is None
    drift = trainer.off_policy_mask_threshold is not None
    if drift and not (on_policy and inputs.get("sampling_per_token_logps") is None):
        return "off_policy_mask_threshold takes a mean over sequences"
    names = ("log_probs", "entropy") if trainer._entropy_bonus_enabled else ("log_probs",)
    if on_policy and trainer.beta == 0.0:
        return ExpectedLoss(grpo_loss(trainer, inputs), names)
    local = trainer.importance_sampling_level == "token" or (
        on_policy and not trainer.args.use_bias_correction_kl
    )
    if local and (on_policy or trainer.loss_type != "vespo"):
        return ExpectedLoss(grpo_loss(trainer, inputs), names, token_local=True)
    alone = inputs["completion_ids"].size(0) == 1 and trainer.beta == 0.0
    if alone and names == ("log_probs",):  # one ratio: the common factor
        without = {name: x for name, x in inputs.items() if name != "old_per_token_logps"}
        return ExpectedLoss(grpo_loss(trainer, without))
    return "ratios of whole sequences follow from the loss only"


LOSSES: Mapping[str, Callable[[Any, Mapping[str, Any]], Expectation]] = {
    "trl.trainer.sft_trainer": _sft,
    "trl.trainer.dpo_trainer": _dpo,
    "trl.trainer.kto_trainer": _kto,
    "trl.trainer.grpo_trainer": _grpo,
    "trl.trainer.rloo_trainer": _rloo,
}
