"""Random programs for autograd: operations, nested checkpoint regions, and how to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from offload_operations import FORBIDDEN, OPERATIONS, Leaves
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KINDS = ("non_reentrant", "reentrant", "selective")
PASSING = ("positional", "nested", "keyword")
SELECTED = [torch.ops.aten.mm.default, torch.ops.aten.tanh.default, torch.ops.aten.addmm.default]


@dataclass(frozen=True)
class Step:
    """One operation on two earlier values, counted from the newest."""

    operation: str
    first: int
    second: int
    argument: int


@dataclass(frozen=True)
class Region:
    """Steps under a checkpoint; its inputs come as arguments, in a dict, or by keyword."""

    kind: str
    passing: str
    first: int
    second: int
    steps: tuple[Step | Region, ...]


Program = tuple["Step | Region", ...]


@dataclass
class Ledger:
    """Weak references to the storage of every value that a program made."""

    storages: list[StorageWeakRef] = field(default_factory=list)

    def note(self, value: Tensor) -> Tensor:
        self.storages.append(StorageWeakRef(value.untyped_storage()))
        return value

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def run_steps(
    steps: Program, values: list[Tensor], leaves: Leaves, note: Callable[[Tensor], Tensor]
) -> Tensor:
    """The last value, plus what no later step used, so that every value has a gradient."""
    values = list(values)
    for step in steps:
        first = values[-1 - step.first % len(values)]
        second = values[-1 - step.second % len(values)]
        if isinstance(step, Region):
            values.append(note(_run_region(step, first, second, leaves, note)))
            continue
        operation = OPERATIONS.get(step.operation) or FORBIDDEN[step.operation]
        values.append(note(operation(first, second, leaves, step.argument)))
    return values[-1] if len(values) == 1 else values[-1] + 0.5 * values[-2]


def _run_region(
    region: Region, first: Tensor, second: Tensor, leaves: Leaves, note: Callable[[Tensor], Tensor]
) -> Tensor:
    def positional(a: Tensor, b: Tensor) -> Tensor:
        return run_steps(region.steps, [a, b], leaves, note)

    def nested(values: dict[str, list[Tensor]]) -> Tensor:
        return positional(*values["pair"])

    def keyword(*, a: Tensor, b: Tensor) -> Tensor:
        return positional(a, b)

    if region.kind == "reentrant":
        out: Tensor = checkpoint(positional, first, second, use_reentrant=True)
        return out
    options: dict[str, object] = {"use_reentrant": False}
    if region.kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SELECTED)
    if region.passing == "nested":
        out = checkpoint(nested, {"pair": [first, second]}, **options)
    elif region.passing == "keyword":
        out = checkpoint(keyword, a=first, b=second, **options)
    else:
        out = checkpoint(positional, first, second, **options)
    return out


def plain_steps(names: tuple[str, ...]) -> st.SearchStrategy[Step]:
    places = st.integers(0, 3)
    return st.builds(Step, st.sampled_from(names), places, places, st.integers(0, 7))


def regions(
    steps: st.SearchStrategy[Step | Region], kinds: tuple[str, ...]
) -> st.SearchStrategy[Region]:
    places = st.integers(0, 3)
    return st.builds(
        Region,
        st.sampled_from(kinds),
        st.sampled_from(PASSING),
        places,
        places,
        st.lists(steps, min_size=1, max_size=4).map(tuple),
    )


def programs(
    *, size: int = 6, forbidden: bool = False, kinds: tuple[str, ...] = KINDS
) -> st.SearchStrategy[Program]:
    """Up to `size` steps, regions nested twice; `forbidden` adds edits of saved tensors."""
    names = (*OPERATIONS, *(FORBIDDEN if forbidden else ()))
    step: st.SearchStrategy[Step | Region] = plain_steps(names)
    if kinds:
        inner = regions(step, kinds)
        outer = regions(step | inner, kinds)
        step = step | step | inner | outer
    return st.lists(step, min_size=1, max_size=size).map(tuple)
