"""Random programs for autograd: operations, nested checkpoint regions, and how to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from offload_operations import FORBIDDEN, OPERATIONS, Leaves
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torch.utils import checkpoint as torch_checkpoint
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
Checkpoint = Callable[..., Tensor]


def _ending_checkpoint(
    function: Callable[..., Tensor],
    *args: Any,
    context_fn: Any = torch_checkpoint.noop_context_fn,
    **kwargs: Any,
) -> Tensor:
    """A non-reentrant checkpoint that ends its generator when the function raises."""
    options = (True, context_fn, "default", False, True)
    halves = torch_checkpoint._checkpoint_without_reentrant_generator(
        function, *options, *args, **kwargs
    )
    next(halves)
    try:
        result = function(*args, **kwargs)
    except BaseException:
        halves.close()
        raise
    assert next(halves, None) is None
    return result


stock_checkpoint: Checkpoint = partial(checkpoint, use_reentrant=False)
# As torch's own does from 2.12 on. Up to 2.11 the garbage collector ends the generator, which takes
# hooks and modes off the stacks of whoever runs then: plain autograd fails or gives other numbers.
sound_checkpoint: Checkpoint = (
    _ending_checkpoint if TorchVersion(torch.__version__) < "2.12" else stock_checkpoint
)


@dataclass(frozen=True)
class Ledger:
    """Weak references to the storage of every value that a program made; its checkpoint."""

    storages: list[StorageWeakRef] = field(default_factory=list)
    checkpoint: Checkpoint = stock_checkpoint

    def note(self, value: Tensor) -> Tensor:
        self.storages.append(StorageWeakRef(value.untyped_storage()))
        return value

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def run_steps(steps: Program, values: list[Tensor], leaves: Leaves, ledger: Ledger) -> Tensor:
    """The last value, plus what no later step used, so that every value has a gradient."""
    values = list(values)
    for step in steps:
        first = values[-1 - step.first % len(values)]
        second = values[-1 - step.second % len(values)]
        if isinstance(step, Region):
            values.append(ledger.note(_run_region(step, first, second, leaves, ledger)))
            continue
        operation = OPERATIONS.get(step.operation) or FORBIDDEN[step.operation]
        values.append(ledger.note(operation(first, second, leaves, step.argument)))
    return values[-1] if len(values) == 1 else values[-1] + 0.5 * values[-2]


def _run_region(
    region: Region, first: Tensor, second: Tensor, leaves: Leaves, ledger: Ledger
) -> Tensor:
    if region.kind == "reentrant":
        # In backward it runs its inside without any context: an error there is torch's to end.
        ledger = replace(ledger, checkpoint=sound_checkpoint)

    def positional(a: Tensor, b: Tensor) -> Tensor:
        return run_steps(region.steps, [a, b], leaves, ledger)

    def nested(values: dict[str, list[Tensor]]) -> Tensor:
        return positional(*values["pair"])

    def keyword(*, a: Tensor, b: Tensor) -> Tensor:
        return positional(a, b)

    if region.kind == "reentrant":
        out: Tensor = checkpoint(positional, first, second, use_reentrant=True)
        return out
    options: dict[str, object] = {}
    if region.kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SELECTED)
    if region.passing == "nested":
        return ledger.checkpoint(nested, {"pair": [first, second]}, **options)
    if region.passing == "keyword":
        return ledger.checkpoint(keyword, a=first, b=second, **options)
    return ledger.checkpoint(positional, first, second, **options)


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
