"""How many tokens may go through the models of a trainer at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowpeak.models import FusedCausalLMOutput, SeveralCalls

from ..padding_free import IGNORE_INDEX, PaddingFree
from ..prompt_sharing import prefix_facts
from .groups import Group, as_many, packed_groups, padded_groups, shared_groups
from .rows import PaddedBatch, check_splittable

logger = logging.getLogger("lowpeak.trainers")


class TokenBudget:
    """Groups the rows of batches; off until `switch` is called.

    As a `lowpeak.models.BatchLayout` it computes calls without gradients a group at a time, such as
    those of reference models; those with gradients are split where they are made.

    Args:
        layout: tells whether padding is computed.
    """

    def __init__(self, layout: PaddingFree) -> None:
        self._layout = layout
        self._tokens: int | None = None
        self._multiple = 1
        self._most: Callable[[int], int] = int
        self._warned = False
        self._suspended = False

    def switch(self, tokens: int, multiple: int | None, most: Callable[[int], int]) -> None:
        """Compute at most `tokens` at a time from now on.

        Args:
            tokens: the budget.
            multiple: what the rows of a call are filled up to, None for nothing.
            most: the largest number among those that the processes call it with, where they must
                make the same number of calls.
        """
        self._tokens, self._multiple, self._most = tokens, multiple or 1, most

    @property
    def on(self) -> bool:
        """Whether there is a budget."""
        return self._tokens is not None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave calls as they are: their rows have been grouped."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def batch(self, arguments: Mapping[str, Any]) -> PaddedBatch | None:
        """The rows of a call of a model in groups; None where it may be made at once.

        Raises:
            ValueError: for a call that cannot be made in groups.
        """
        ids = arguments["input_ids"]
        shape = (ids.size(0), ids.size(1))
        mask = arguments.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None or mask.dim() != 2 else mask
        groups, widths = self.groups(mask, ids, arguments.get("labels"))
        if len(groups) == 1:
            return None
        check_splittable(arguments, shape)
        return PaddedBatch(arguments, shape, groups, widths)

    def groups(
        self, mask: Tensor, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[list[Group], list[int]]:
        """Groups of the rows of a padding mask [B, S], and how many columns each needs.

        Tokens and labels, [B, S] as well, tell which rows share tokens.
        """
        assert self._tokens is not None
        width = mask.size(1)
        real = mask != 0
        edges = width - real.flip(1).to(torch.uint8).argmax(1)
        facts = edges.new_empty(0)
        if self._layout.on and self._layout.shares and ids is not None and labels is not None:
            facts = prefix_facts(ids, real, (labels[:, 1:] != IGNORE_INDEX).to(real.device))
        numbers = torch.cat([real.sum(1), edges, facts]).tolist()
        rows = mask.size(0)
        lengths, ends, known = numbers[:rows], numbers[rows : 2 * rows], numbers[2 * rows :]
        ends = [min(width, self._filled(end)) for end in ends]
        if self._layout.on:
            budget = max(self._tokens // self._multiple * self._multiple, 1)
            groups = (
                shared_groups(lengths, known, budget) if known else packed_groups(lengths, budget)
            )
            self._warn(max(lengths))
        else:
            groups = padded_groups(ends, self._tokens)
            self._warn(max(ends))
        # the last one runs once only
        groups.sort(key=lambda group: sum(lengths[row] for row in group.rows))
        groups = as_many(groups, self._most(len(groups)))
        return groups, [max(ends[row] for row in group.rows) for group in groups]

    def _filled(self, tokens: int) -> int:
        return -(-tokens // self._multiple) * self._multiple

    def _warn(self, longest: int) -> None:
        assert self._tokens is not None
        if longest > self._tokens and not self._warned:
            self._warned = True
            logger.warning(
                "a sequence of %d tokens is longer than max_tokens_per_batch=%d and goes through "
                "the model alone; so will others",
                longest,
                self._tokens,
            )

    def __call__(self, arguments: dict[str, Any], labels: Tensor) -> SeveralCalls | None:
        """A call without gradients in groups; None leaves it as it is."""
        if not self.on or self._suspended or torch.is_grad_enabled():
            return None
        if "input_ids" not in arguments or not isinstance(arguments["input_ids"], Tensor):
            return None
        batch = self.batch({**arguments, "labels": labels})
        if batch is None:
            return None
        parts = [batch.part(index) for index in range(len(batch.groups))]

        def join(outputs: Sequence[FusedCausalLMOutput]) -> FusedCausalLMOutput:
            fields = [batch.fields(index, output) for index, output in enumerate(outputs)]
            return FusedCausalLMOutput(**batch.join(fields))

        return SeveralCalls(tuple((part, part.pop("labels")) for part in parts), join)
