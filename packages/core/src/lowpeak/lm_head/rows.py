"""Which rows count, and whether their targets are valid: one host synchronisation for both."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def select_rows(
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    temperature: Tensor | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Indices of the rows whose target is not `ignore_index`, int64; None when all rows count.

    Raises what `order_rows` does.
    """
    rows, _ = order_rows(targets, vocabulary, ignore_index, temperature, bias, None)
    return rows


def order_rows(
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    temperature: Tensor | None,
    bias: Tensor | None,
    busy: Tensor | None,
) -> tuple[Tensor | None, int]:
    """`select_rows` with the `busy` rows first ([N] bool; None: all are), and how many those are.

    Raises:
        IndexError: for a target that is neither `ignore_index` nor in [0, vocabulary).
        ValueError: for a temperature that is not positive in a row that counts, or a bias that
            masks every token.
    """
    if targets.numel() == 0:
        return None, 0
    valid = targets != ignore_index
    bad_target = valid & ((targets < 0) | (targets >= vocabulary))
    place = bad_target.to(torch.uint8).argmax(dim=0, keepdim=True)
    # index_select: targets[place] would read the index on the host
    found = targets.index_select(0, place)
    busy = valid if busy is None else valid & busy
    facts = [valid.sum(), busy.sum(), bad_target.sum(), place.squeeze(0), found.squeeze(0)]
    if temperature is not None:
        facts.append((valid & ~(temperature > 0)).sum())
    if bias is not None:
        facts.append((bias > -float("inf")).any().long())
    count, active, bad, where, value, *rest = torch.stack(facts).tolist()
    if bad:
        raise IndexError(
            f"targets[{where}] (flattened) is {value}, neither ignore_index={ignore_index} nor in "
            f"[0, {vocabulary}); {bad} of {targets.numel()} targets are out of range"
        )
    if temperature is not None and rest.pop(0):
        raise ValueError("temperature must be positive in every row that is not ignored")
    if bias is not None and count and not rest.pop():
        raise ValueError("bias is -inf everywhere: no token of the vocabulary has a finite logit")
    if active == count:
        return (None if count == targets.numel() else positions(valid, count)), active
    idle = positions(valid & ~busy, count - active)
    return torch.cat([positions(busy, active), idle]), active


def nonzero(values: Mapping[str, Tensor]) -> Tensor:
    """Whether any of the [N] tensors is not 0 in a row; NaN is not."""
    return torch.stack([x != 0 for x in values.values()]).any(0)


def nonzero_rows(values: Mapping[str, Tensor]) -> Tensor | None:
    """Indices of the rows where any of the [N] tensors is not 0, None when all are.

    One host synchronisation.
    """
    if not values:
        return None
    busy = nonzero(values)
    count = int(busy.sum())
    return None if count == busy.numel() else positions(busy, count)


def positions(valid: Tensor, count: int) -> Tensor:
    """Indices of the `count` rows that are True in `valid`, without a synchronisation."""
    # The rows' own positions go to their rank; the ignored ones share one slot behind the last.
    rank = torch.where(valid, valid.cumsum(0) - 1, count)
    rows = torch.empty(count + 1, dtype=torch.int64, device=valid.device)
    return rows.scatter_(0, rank, torch.arange(valid.numel(), device=valid.device))[:count]


def assert_rows(
    targets: Tensor,
    vocabulary: int,
    ignore_index: int,
    temperature: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(mask of the rows that count, targets with 0 in the others) without a synchronisation.

    A target out of range, a temperature that is not positive or a bias that masks every token fails
    an assertion on the device.
    """
    valid = targets != ignore_index
    fine = ~valid | ((targets >= 0) & (targets < vocabulary))
    if temperature is not None:
        fine = fine & (~valid | (temperature > 0))
    fine = fine.all()
    if bias is not None:
        fine = fine & ((bias > -float("inf")).any() | ~valid.any())
    message = (
        f"a target is neither ignore_index nor in [0, {vocabulary}), a temperature is not > 0, "
        "or the bias is -inf everywhere"
    )
    torch._assert_async(fine, message)
    return valid, torch.where(valid, targets, 0)


def gathered(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of x [N, ...] that count; None is all of them."""
    return x if rows is None else x.index_select(0, rows)


def scattered(x: Tensor, rows: Tensor | None, total: int) -> Tensor:
    """x at its rows of `total`, 0 in the others. Differentiable."""
    if rows is None:
        return x
    return x.new_zeros(total, *x.shape[1:]).index_copy_(0, rows, x)


def placed(value: Tensor, rows: Tensor | None, valid: Tensor | None, shape: torch.Size) -> Tensor:
    """One [n] output at its rows, 0 in the ignored ones, in `shape`. Differentiable."""
    if valid is not None:
        value = torch.where(valid, value, torch.zeros_like(value))
    return scattered(value, rows, shape.numel()).reshape(shape)
