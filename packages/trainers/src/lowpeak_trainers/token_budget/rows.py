"""Rows of a padded batch taken out of it, and their outputs put back together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from lowpeak.models.outputs import PER_TOKEN

from .groups import Group

# Fields of an output with a value per token but the first.
_BY_TOKEN = frozenset({*PER_TOKEN, "label_mask"})
# TRL hands the margins of a reward model's pairs to the model, none of whose layers reads them.
_UNREAD = "margin"
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class PaddedBatch:
    """The arguments of a call of the model on rows [B, S].

    Args:
        arguments: tensors among them are [B, S].
        shape: B and S.
        groups: of the rows, together all of them.
        widths: of each group, columns behind which all its rows are padding.
    """

    arguments: Mapping[str, Any]
    shape: tuple[int, int]
    groups: Sequence[Group]
    widths: Sequence[int]

    def part(self, index: int) -> dict[str, Any]:
        """The arguments for a group alone: [rows, width]."""
        group, width = self.groups[index], self.widths[index]
        return {
            name: x[list(group.rows), :width] if self._per_row(name, x) else x
            for name, x in self.arguments.items()
        }

    def _per_row(self, name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and name != _UNREAD and value.dim() > 1

    def fields(self, index: int, output: Any) -> Fields:
        """The tensors of a group's output that have a row for each of its rows, as wide as S."""
        if not isinstance(output, ModelOutput):
            raise TypeError(
                f"max_tokens_per_batch: the model returns a {type(output).__name__}, no fields. "
                "Call it with return_dict=True, or set max_tokens_per_batch=None"
            )
        rows, missing = len(self.groups[index].rows), self.missing(index)
        found = {}
        for name, value in output.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == rows:
                found[name] = _as_wide(name, value, missing)
        return found

    def join(self, parts: Sequence[Fields]) -> Fields:
        """The fields of all groups in the order of the batch."""
        kept = [(g, p) for g, p in zip(self.groups, parts, strict=True) if g.counts]
        order = torch.tensor([row for group, _ in kept for row in group.rows]).argsort()
        names = kept[0][1].keys()
        joined = {name: torch.cat([part[name] for _, part in kept]) for name in names}
        return {name: x.index_select(0, order.to(x.device)) for name, x in joined.items()}

    def missing(self, index: int) -> int:
        """How many columns of padding a group is computed without."""
        return self.shape[1] - self.widths[index]


def _as_wide(name: str, value: Tensor, missing: int) -> Tensor:
    if name in _BY_TOKEN:
        return nn.functional.pad(value, (0, missing))
    if name == "logits" and value.dim() == 3:  # of a model for metrics of the caller's own
        return nn.functional.pad(value, (0, 0, 0, missing))
    return value


def check_splittable(arguments: Mapping[str, Any], shape: tuple[int, int]) -> None:
    """Refuse what is neither per token nor of the whole call.

    Raises:
        ValueError: for images and the like, and for a loss over routers.
    """
    if arguments.get("output_router_logits"):
        raise ValueError(
            "max_tokens_per_batch: the load-balancing loss of experts is one of the whole batch. "
            "Set router_aux_loss_coef=0.0, or max_tokens_per_batch=None"
        )
    odd = [
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name != _UNREAD and value.dim() > 0
        if tuple(value.shape[:2]) != shape
    ]
    if odd:
        raise ValueError(
            f"max_tokens_per_batch: {', '.join(odd)} of the batch have no row for each sequence. "
            "Set max_tokens_per_batch=None"
        )
