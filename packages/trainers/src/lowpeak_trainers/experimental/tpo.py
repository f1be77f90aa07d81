"""Triple preference optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.models import FusedCausalLMOutput

from ..compatibility import check_experimental
from ..padding_free import IGNORE_INDEX
from ..removed_options import TrainerConfig
from .fused_log_probs import FusedLogProbs

check_experimental("tpo")

from trl.experimental import tpo as trl_tpo  # noqa: E402  # the gate comes first


@dataclass
class TPOConfig(TrainerConfig, trl_tpo.TPOConfig):
    """Settings of `trl.experimental.tpo.TPOConfig` and `lowpeak.MemoryConfig`."""


class TPOTrainer(FusedLogProbs, trl_tpo.TPOTrainer):
    """`trl.experimental.tpo.TPOTrainer` without logits: same arguments, same results."""

    beta: float
    label_smoothing: float
    loss_type: str
    tpo_alpha: float
    tpo_l_gamma: float
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    _tp_size: int

    @property
    def _head_outputs(self) -> tuple[str, ...]:
        return ("log_probs", "entropy", "mean_logits", "is_top1")

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """As TRL's, which also computes it where the outputs are asked for: they are logits."""
        if self._handle is None or return_outputs:
            return super()._compute_loss(model, inputs, return_outputs)
        arguments = {name: x for name, x in inputs.items() if name != "completion_mask"}
        mask = inputs["completion_mask"].bool()
        labels = inputs["input_ids"].masked_fill(~mask, IGNORE_INDEX)
        output = self._fused(model, labels, **arguments)
        assert output.log_probs is not None
        # chosen, rejected and, where there is an nll, the reference
        parts = 2 if self.tpo_alpha == 0.0 else 3
        counted = mask[:, 1:].to(output.log_probs.device)
        lengths = counted.sum(1)
        sums = output.log_probs.sum(1)
        sequences = sums / lengths.clamp(min=1) if self.loss_type in ("ipo", "tpo-l") else sums
        chosen, rejected = sequences.chunk(parts)[:2]
        loss = self._contrast(chosen - rejected).mean()
        if parts == 3:
            nll = -sums.chunk(3)[2].sum() / lengths.chunk(3)[2].sum()
            loss = loss + self.tpo_alpha * nll
        mode = "train" if self.model.training else "eval"
        self._note_tokens(mode, inputs["attention_mask"])
        self._note_head(mode, output, counted, parts)
        self._note_sequences(mode, chosen.detach(), rejected.detach())
        return loss

    def _contrast(self, difference: Tensor) -> Tensor:
        """Loss [B] of log-probabilities, chosen minus rejected; arXiv 2405.16681, 2310.12036."""
        if self.loss_type == "hinge":
            return torch.relu(1 - self.beta * difference)
        if self.loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        if self.loss_type == "tpo-l":
            difference = difference - self.tpo_l_gamma / self.beta
        elif self.loss_type != "sigmoid":
            raise ValueError(
                f"loss_type={self.loss_type!r} is unknown: use sigmoid, hinge, ipo or tpo-l"
            )
        right, wrong = (nn.functional.logsigmoid(s * self.beta * difference) for s in (1, -1))
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong

    def _note_tokens(self, mode: str, attention_mask: Tensor) -> None:
        if mode == "train":
            count = self.accelerator.gather_for_metrics(attention_mask.sum()).sum().item()
            self._total_train_tokens += count // self._tp_size
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def _note_head(
        self, mode: str, output: FusedCausalLMOutput, counted: Tensor, parts: int
    ) -> None:
        entropy, logits, right = output.entropy, output.mean_logits, output.is_top1
        assert entropy is not None
        assert logits is not None
        assert right is not None
        gather, metrics = self.accelerator.gather_for_metrics, self._metrics[mode]
        mean_entropy = entropy.detach().sum() / counted.sum()
        metrics["entropy"].append(gather(mean_entropy).mean().item())
        tokens = [gather(part.sum()).sum().item() for part in counted.chunk(parts)[:2]]
        sums = [gather(part.sum()).sum().item() for part in logits.chunk(parts)[:2]]
        for name, total, count in zip(("chosen", "rejected"), sums, tokens, strict=True):
            metrics[f"logits/{name}"].append(total / count if count else 0.0)
        hits = gather((right & counted).chunk(parts)[0].sum()).sum().item()
        metrics["mean_token_accuracy"].append(hits / tokens[0] if tokens[0] else 0.0)

    def _note_sequences(self, mode: str, chosen: Tensor, rejected: Tensor) -> None:
        rewards = self.beta * chosen, self.beta * rejected
        noted = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/margins": rewards[0] - rewards[1],
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        for name, values in noted.items():
            self._metrics[mode][name].append(self.accelerator.gather(values).mean().item())
