"""A loss that is a sum over tokens, made within the student's wrapper, a group at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowpeak.models import ExpectedLoss

from .budget import TokenBudget
from .calls import Differentiate, callable_now
from .gradients import Repeatable
from .groups import Group
from .rows import Fields

# Loss, sum of the student's entropies and number of scored tokens.
Result = tuple[Tensor, Tensor, Tensor]
_RESULTS = ("loss", "entropy", "count")
_COMPLETION = ("completion_ids", "completion_mask", "tool_mask")


class GroupedRedirection:
    """Stands in for TRL's `_forward_redirection` while a DistillationTrainer computes its loss.

    Args:
        redirect: TRL's own.
        loss: the method that makes the loss of a batch; others are redirected as they are.
        budget: groups the rows.
        differentiate: see `Differentiate`.
        note_targets: told the number of scored tokens of the whole batch.
    """

    def __init__(
        self,
        redirect: Callable[..., Any],
        loss: Callable[..., Any],
        budget: TokenBudget,
        differentiate: Differentiate,
        note_targets: Callable[[Tensor], None],
    ) -> None:
        self._redirect = redirect
        self._loss = loss
        self._budget = budget
        self._differentiate = differentiate
        self._note_targets = note_targets

    def __call__(self, wrapper: Any, model: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a loss [], summed over the groups of its batch."""
        if method != self._loss:
            return self._redirect(wrapper, model, method, *args, **kwargs)
        student, inputs, items = args
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        groups, widths = self._budget.groups(mask)
        if len(groups) == 1:
            return self._redirect(callable_now(wrapper), model, method, *args)
        _check(inputs, mask.size(0))
        divisor = _targets(inputs).clamp(min=1) if items is None else items

        def part(group: Group, width: int) -> Repeatable:
            def run(expected: ExpectedLoss | None) -> Fields:
                rows = _take(inputs, group, width - inputs["prompt_mask"].size(1))
                now = callable_now(wrapper)
                found = self._redirect(now, model, method, student, rows, divisor)
                return dict(zip(_RESULTS, found, strict=True))

            return Repeatable(run, inputs["prompt_ids"].device)

        parts = [part(*each) for each in zip(groups, widths, strict=True)]
        if torch.is_grad_enabled():
            outputs = self._differentiate(parts, _ShareOfSum([group.counts for group in groups]))
        else:
            outputs = [each.first() for each in parts]
        kept = [x for group, x in zip(groups, outputs, strict=True) if group.counts]
        loss, entropy, count = (torch.stack([x[name] for x in kept]).sum(0) for name in _RESULTS)
        self._note_targets(count)
        return loss, entropy, count


class _ShareOfSum:
    """A `Forecast`: all groups that count have the gradient of their sum."""

    def __init__(self, counts: Sequence[bool]) -> None:
        self._counts = counts

    def expected(self, index: int) -> None:
        return None

    def gradients(self, index: int, outputs: Fields) -> Fields:
        return {"loss": torch.full_like(outputs["loss"], float(self._counts[index]))}


def _targets(inputs: Mapping[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return torch.count_nonzero(mask * inputs["tool_mask"] if "tool_mask" in inputs else mask)


def _take(inputs: Mapping[str, Any], group: Group, width: int) -> dict[str, Any]:
    """The rows of a group, their completions cut to `width`, at least one token."""
    rows = list(group.rows)
    taken = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            taken[name] = value[rows, : max(1, width)] if name in _COMPLETION else value[rows]
        else:
            taken[name] = value
    return taken


def _check(inputs: Mapping[str, Any], rows: int) -> None:
    odd = [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != rows
    ]
    if odd or "pixel_values" in inputs:
        names = ", ".join(odd or ["pixel_values"])
        raise ValueError(
            f"max_tokens_per_batch: {names} of the batch have no row for each sequence. "
            "Set max_tokens_per_batch=None"
        )
