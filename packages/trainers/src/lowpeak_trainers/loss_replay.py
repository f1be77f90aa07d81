"""TRL's own GRPO loss, computed on given log-probabilities and without any other effect.

Differentiated, it says what gradients the head is going to receive, whatever the loss type and its
options: nothing of TRL's loss is written down a second time.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import trl
from torch import Tensor

from lowpeak.models import FusedCausalLMOutput


class _Alone:
    """Stands in for the accelerator of a trainer whose metrics nobody is going to read.

    What it gathers and reduces is 0 and on the CPU, so that no process waits for another, and none
    for its device.
    """

    def __init__(self, accelerator: Any) -> None:
        self.num_processes: int = accelerator.num_processes
        self.sync_gradients: bool = accelerator.sync_gradients
        self.device: torch.device = accelerator.device

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self, values: Tensor) -> Tensor:
        return torch.zeros(values.shape or (1,))

    gather_for_metrics = gather

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        return torch.zeros(values.shape)


def grpo_loss(trainer: Any, inputs: Mapping[str, Any]) -> Callable[[FusedCausalLMOutput], Tensor]:
    """The loss of a GRPOTrainer of TRL on `inputs`, as a function of its model's outputs.

    The trainer stays as it is: a shallow copy with metrics of its own computes the loss.
    """

    def loss(output: FusedCausalLMOutput) -> Tensor:
        length = inputs["completion_ids"].size(1)
        assert output.log_probs is not None
        log_probs = output.log_probs[:, -length:]
        entropy = torch.zeros_like(log_probs)
        if output.entropy is not None:
            entropy = output.entropy[:, -length:]
        scores = (log_probs, entropy, log_probs.new_zeros(()))
        twin = copy.copy(trainer)
        vars(twin).update(
            accelerator=_Alone(trainer.accelerator),
            _metrics={mode: defaultdict(list) for mode in ("train", "eval")},
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: scores,
        )
        result: Tensor = trl.GRPOTrainer._compute_loss(twin, None, dict(inputs))
        return result

    return loss
