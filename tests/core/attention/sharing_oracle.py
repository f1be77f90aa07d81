"""Sequences that begin alike, as one row in which what they share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attention_oracle import documents, packed_row
from torch import Tensor, nn

# Of each sequence: the tokens it has of its own, which earlier one it begins like, and how many
# tokens it takes over from that one.
Plan = Sequence[tuple[int, int, int]]
# A group, a chain, one of its own, and one that shares a single token.
SHORT: Plan = [(11, 0, 0), (5, 0, 9), (2, 1, 12), (7, 0, 0), (1, 0, 10), (3, 3, 1)]
# Longer ones than the sliding windows of tiny configurations, which are 16 tokens wide.
LONG: Plan = [(24, 0, 0), (9, 0, 20), (2, 1, 25), (7, 0, 0), (1, 0, 18), (20, 3, 1)]


def sequences(plan: Plan, device: torch.device) -> list[Tensor]:
    """Ids [1, n] of the whole sequences."""
    whole: list[Tensor] = []
    own = documents([count for count, _, _ in plan], device)
    for ids, (_, owner, shared) in zip(own, plan, strict=True):
        whole.append(torch.cat([whole[owner][:, :shared], ids], dim=1) if shared else ids)
    return whole


def shared_row(plan: Plan, whole: list[Tensor]) -> dict[str, Any]:
    """One row of what each sequence has of its own."""
    row = packed_row([ids[:, shared:] for ids, (_, _, shared) in zip(whole, plan, strict=True)])
    positions = [
        torch.arange(shared, ids.size(1), device=ids.device)
        for ids, (_, _, shared) in zip(whole, plan, strict=True)
    ]
    return row | {
        "position_ids": torch.cat(positions).unsqueeze(0),
        "shared_prefixes": torch.tensor(plan),
    }


def own_parts(plan: Plan, logits: Tensor) -> list[Tensor]:
    """Logits [1, T, V] of the row by sequence, as many zeros in front as it takes over."""
    parts = logits.split([own for own, _, _ in plan], dim=1)
    return [
        nn.functional.pad(x, (0, 0, shared, 0))
        for x, (_, _, shared) in zip(parts, plan, strict=True)
    ]


def weighted_parts(plan: Plan, parts: list[Tensor]) -> Tensor:
    """A scalar in which every logit of a sequence's own tokens has a weight of its own."""
    total = parts[0].new_zeros(())
    for logits, (own, _, _) in zip(parts, plan, strict=True):
        mine = logits[:, -own:].flatten()
        weights = torch.arange(mine.numel(), device=mine.device, dtype=mine.dtype).sin()
        total = total + (mine * weights).sum()
    return total
