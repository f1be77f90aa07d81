"""Which rows of a batch begin alike, and which tokens are then computed once for several.

Rows are compared by their tokens: TRL shuffles the rows of GRPO's groups, and puts the rejected
rows of DPO behind the chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A prefix below this is not shared: such are a first token or the opening of a chat template, and
# each would split a row in two for the attention.
SHORTEST = 16
# Nor is anything where less than this part of a batch's tokens would go: every layer copies the
# keys and values of all tokens for it.
SMALLEST_PART = 1 / 16
# Comparisons of tokens that live at a time: 64 MiB.
_SCRATCH_BYTES = 1 << 26


@dataclass(frozen=True)
class SharedPrefix:
    """What a row takes over from an earlier one.

    Args:
        owner: index of that row, which may have taken over some of it itself.
        tokens: number of tokens; 0 for nothing.
    """

    owner: int = 0
    tokens: int = 0


def prefix_facts(ids: Tensor, real: Tensor, labelled: Tensor) -> Tensor:
    """What `choose_prefixes` needs to know of a batch, [B * (B + 1)] int64 on the device of `ids`.

    Args:
        ids: [B, S] token ids.
        real: [B, S] bool, False at padding, True in one stretch of each row.
        labelled: [B, S - 1] bool, True at tokens after the first that are scored.
    """
    rows, length = ids.shape
    columns = torch.arange(length, device=ids.device)
    starts = real.to(torch.uint8).argmax(1)
    end = labelled.new_ones(rows, 1)
    first_labels = torch.cat([labelled, end], dim=1).to(torch.uint8).argmax(1) + 1 - starts
    # tokens of padding agree with anything: the lengths, on the host, tell them
    aligned = ids.gather(1, (columns + starts.unsqueeze(1)).clamp_(max=length - 1))
    common = []
    step = max(1, _SCRATCH_BYTES // (rows * length))
    for start in range(0, rows, step):
        some = aligned[start : start + step]
        differ = some.unsqueeze(1) != aligned
        first = differ.view(torch.uint8).argmax(-1)  # of equal values the first
        common.append(torch.where(differ.any(-1), first, length))
    return torch.cat([first_labels, torch.cat(common).flatten()])


def choose_prefixes(lengths: list[int], facts: list[int]) -> list[SharedPrefix]:
    """What each row takes over from which earlier row.

    It takes as much as it can, and keeps the token that predicts its first scored one.

    Args:
        lengths: real tokens of each row.
        facts: what `prefix_facts` found.
    """
    rows = len(lengths)
    chosen = [longest_prefix(row, range(row), lengths, facts) for row in range(rows)]
    if sum(prefix.tokens for prefix in chosen) < SMALLEST_PART * sum(lengths):
        return [SharedPrefix()] * rows
    return chosen


def longest_prefix(
    row: int, owners: Iterable[int], lengths: list[int], facts: list[int]
) -> SharedPrefix:
    """What a row takes over where it may from these rows only, the first of equals."""
    rows = len(lengths)
    most = min(lengths[row], facts[row]) - 1
    best = SharedPrefix()
    for owner in owners:
        tokens = min(most, lengths[owner], facts[rows + row * rows + owner])
        if tokens >= SHORTEST and tokens > best.tokens:
            best = SharedPrefix(owner, tokens)
    return best


def facts_of(rows: Sequence[int], facts: list[int], count: int) -> list[int]:
    """What `prefix_facts` would find of a batch of some rows of a batch of `count`."""
    common = [facts[count + row * count + owner] for row in rows for owner in rows]
    return [facts[row] for row in rows] + common
