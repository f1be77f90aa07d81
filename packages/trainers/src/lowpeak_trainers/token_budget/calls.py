"""Stands in for a trainer's model while TRL computes its loss: groups of rows, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowpeak.models import ExpectedLoss, FusedCausalLMOutput, expecting
from lowpeak.models.expected_loss import expected_loss

from .budget import TokenBudget
from .gradients import Forecast, Repeatable
from .rows import Fields, PaddedBatch

# Takes the groups of a call, keeps what differentiates them later, and returns their outputs.
Differentiate = Callable[[list[Repeatable], Forecast | None], list[Fields]]


class GroupedModel:
    """The model of a trainer for `compute_loss`; what is asked of it but a call goes to the model.

    Args:
        model: as the trainer calls it, in the wrapper of DDP or FSDP.
        budget: groups the rows.
        differentiate: see `Differentiate`.
    """

    def __init__(self, model: Any, budget: TokenBudget, differentiate: Differentiate) -> None:
        self._model = model
        self._budget = budget
        self._differentiate = differentiate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **arguments: Any) -> Any:
        """As the model, whose output has the tensors with a row for each sequence only."""
        batch = self._budget.batch(arguments)
        if batch is None:
            with self._budget.suspended():
                return callable_now(self._model)(**arguments)
        kind: list[type] = []
        parts = [self._part(batch, index, kind) for index in range(len(batch.groups))]
        if torch.is_grad_enabled():
            told = expected_loss(None) if "labels" in arguments else None
            forecast = None if told is None else LossOfRows(batch, told)
            outputs = self._differentiate(parts, forecast)
        else:
            outputs = [part.first() for part in parts]
        return kind[0](**batch.join(outputs))

    def _part(self, batch: PaddedBatch, index: int, kind: list[type]) -> Repeatable:
        def run(expected: ExpectedLoss | None) -> Fields:
            # what the trainer tells of the whole batch does not hold for a part of it
            with expecting(lambda: expected), self._budget.suspended():
                output = callable_now(self._model)(**batch.part(index))
            kind.append(type(output))
            return batch.fields(index, output)

        return Repeatable(run, batch.arguments["input_ids"].device)


def callable_now(model: Any) -> Any:
    """The model, but without DDP where no gradients are needed.

    DDP communicates in the first forward after a step, and more in one with gradients: without them
    processes that make different numbers of calls would get out of step.
    """
    if isinstance(model, DistributedDataParallel) and not torch.is_grad_enabled():
        return model.module
    return model


@dataclass(frozen=True)
class LossOfRows:
    """The expected loss of a batch for the rows of one group; a `Forecast`.

    Args:
        batch: the call.
        told: the loss of the outputs of all its rows.
    """

    batch: PaddedBatch
    told: ExpectedLoss

    def expected(self, index: int) -> ExpectedLoss | None:
        """The loss with zeros for the outputs of other rows."""
        batch, told = self.batch, self.told
        rows = torch.tensor(batch.groups[index].rows)
        missing = batch.missing(index)
        if not batch.groups[index].counts:
            return None

        def loss(output: FusedCausalLMOutput) -> Tensor:
            fields: dict[str, Any] = {}
            for name in told.names:
                values: Tensor = getattr(output, name)
                whole = nn.functional.pad(values, (0, missing))
                nothing = whole.new_zeros(batch.shape[0], whole.size(1))
                fields[name] = nothing.index_copy(0, rows.to(whole.device), whole)
            mask = batch.arguments["labels"][:, 1:] != -100
            short = fields["log_probs"].size(1) - mask.size(1)
            return told.of(
                FusedCausalLMOutput(label_mask=nn.functional.pad(mask, (short, 0)), **fields)
            )

        return ExpectedLoss(loss, told.names, told.token_local)

    def gradients(self, index: int, outputs: Fields) -> Fields:
        """Those of the expected loss."""
        missing = self.batch.missing(index)
        expected = self.expected(index)
        names = self.told.names
        if expected is None:
            return {name: torch.zeros_like(outputs[name]) for name in names}
        short = {name: outputs[name][:, : outputs[name].size(1) - missing] for name in names}
        if not self.told.token_local:
            short = {name: torch.zeros_like(x) for name, x in short.items()}
        device = short["log_probs"].device.type
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            leaves = {name: x.detach().clone().requires_grad_() for name, x in short.items()}
            scalar = expected.of(FusedCausalLMOutput(**leaves))
            found = torch.autograd.grad(scalar, list(leaves.values()), materialize_grads=True)
        padded = (nn.functional.pad(x, (0, missing)) for x in found)
        return dict(zip(names, padded, strict=True))
