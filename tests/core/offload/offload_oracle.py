"""Scenarios around random programs, and their oracle: plain autograd, by bits and words."""

from __future__ import annotations

import gc
import re
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from offload_graphs import Ledger, Program, programs, run_steps, sound_checkpoint
from offload_operations import Leaves, make_leaves
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

FAST = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    # Making a failing graph smaller takes minutes: the slow test does it.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]

BACKWARDS = ("once", "retained", "double", "subset", "twice", "halves", "dropped", "thread")
LAYOUTS = ("one", "shared", "two", "nested", "reentered", "threads")


@dataclass(frozen=True)
class Scenario:
    """Programs, how contexts lie around them, and what is done with the graphs."""

    graphs: tuple[Program, ...]
    layout: str
    backward: str
    inside: bool
    newest_first: bool
    seed: int


@dataclass(frozen=True)
class Graph:
    """A forward that ran: its leaves, its output and the weights of its loss."""

    leaves: Leaves
    out: Tensor
    weights: Tensor

    def loss(self) -> Tensor:
        return (self.out * self.weights).sum()


# Torch names the node that the tensor has when the error is raised, the edit's, not that of saving.
ORIGIN = re.compile(r", which is output \d+ of [\w:]+,")


def words(error: Exception | None) -> str:
    """An error's type and text, without the node that torch names."""
    return f"{type(error).__name__}: {ORIGIN.sub('', str(error))}"


Event = tuple[str, tuple[Tensor | None, ...] | str]


def scenarios(
    *, forbidden: bool = False, size: int = 6, backwards: tuple[str, ...] = BACKWARDS
) -> st.SearchStrategy[Scenario]:
    """One or two graphs in every layout of contexts and every use of the graph."""
    program = programs(size=size, forbidden=forbidden)
    return st.builds(
        Scenario,
        st.tuples(program) | st.tuples(program, program),
        st.sampled_from(LAYOUTS),
        st.sampled_from(backwards),
        st.booleans(),
        st.booleans(),
        st.integers(0, 99),
    )


def bits(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in every bit, so that nan equals nan and 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().reshape(-1).contiguous(), b.detach().reshape(-1).contiguous()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _guarded(name: str, action: Callable[[], tuple[Tensor | None, ...]]) -> Event:
    try:
        return name, tuple(bits(value) for value in action())
    except (RuntimeError, AssertionError, ValueError) as error:
        # Up to torch 2.11 the frames of a checkpoint that raised keep its hooks in place.
        traceback.clear_frames(error.__traceback__)
        return name, words(error)


def _forward(program: Program, seed: int, ledger: Ledger) -> Graph:
    leaves = make_leaves(seed)
    out = run_steps(program, list(leaves.inputs), leaves, ledger)
    generator = torch.Generator().manual_seed(seed + 1)
    return Graph(leaves, out, torch.randn(out.shape, generator=generator))


def _use(graph: Graph, how: str) -> tuple[Tensor | None, ...]:
    """Gradients, by the way named `how`."""
    leaves = graph.leaves.all()
    if how == "dropped":
        return (graph.out,)
    if how == "subset":
        chosen = [graph.leaves.inputs[1], graph.leaves.scale]
        return torch.autograd.grad(graph.loss(), chosen, allow_unused=True)
    if how == "double":
        first = torch.autograd.grad(graph.loss(), leaves, create_graph=True, allow_unused=True)
        present = [value for value in first if value is not None and value.requires_grad]
        if not present:
            return first
        torch.stack([(value * value).sum() for value in present]).sum().backward()
    elif how == "halves":
        upper, lower = graph.out[:2].sum(), (graph.out[2:] * 2).sum()
        upper.backward(retain_graph=True)
        lower.backward()
    elif how == "thread":
        _in_thread(lambda: graph.loss().backward())
    elif how == "retained":
        graph.loss().backward(retain_graph=True)
        graph.loss().backward()
    else:
        loss = graph.loss()
        loss.backward()
        if how == "twice":
            loss.backward()
    return tuple(leaf.grad for leaf in leaves)


def _in_thread(action: Callable[[], object]) -> None:
    errors: list[Exception] = []

    def body() -> None:
        try:
            action()
        except Exception as error:  # raised again by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _forward_all(scenario: Scenario, contexts: Contexts, ledger: Ledger) -> list[Graph]:
    """Every graph alive at once, made under the contexts of the layout."""
    first, second = contexts
    graphs: list[Graph] = []

    def make(index: int) -> None:
        graphs.append(_forward(scenario.graphs[index], scenario.seed + index, ledger))

    count = len(scenario.graphs)
    if scenario.layout in ("shared", "one"):
        with first:
            for index in range(count):
                make(index)
    elif scenario.layout == "two":
        for index, context in zip(range(count), contexts, strict=False):
            with context:
                make(index)
    elif scenario.layout == "nested":
        with first:
            make(0)
            with second:
                for index in range(1, count):
                    make(index)
    elif scenario.layout == "reentered":
        with first, first:
            make(0)
        for index in range(1, count):
            with first:
                make(index)
    else:
        for index in range(count):
            _in_thread(lambda index=index: _entered(first, lambda: make(index)))
    return graphs


def _entered(context: AbstractContextManager[object], action: Callable[[], object]) -> None:
    with context:
        action()


def play(scenario: Scenario, contexts: Contexts, ledger: Ledger) -> list[Event]:
    """What a user would see: outputs, gradients, or the errors raised on the way."""
    torch.manual_seed(scenario.seed)
    graphs: list[Graph] = []

    def forward() -> tuple[Tensor | None, ...]:
        graphs.extend(_forward_all(scenario, contexts, ledger))
        return tuple(graph.out for graph in graphs)

    events = [_guarded("forward", forward)]
    order = reversed(graphs) if scenario.newest_first else iter(graphs)
    with ExitStack() as stack:
        if scenario.inside:
            stack.enter_context(contexts[0])
        for graph in order:
            events.append(_guarded("backward", lambda graph=graph: _use(graph, scenario.backward)))
    return events


def play_plain(scenario: Scenario) -> list[Event]:
    """The same by plain autograd."""
    return play(scenario, (nullcontext(), nullcontext()), Ledger(checkpoint=sound_checkpoint))


class _Handle:
    """What hooks that only compare versions put into the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("modified")
        return self.tensor


class _InertHooks:
    """Saved-tensor hooks that move nothing; may be entered again, as the helper may."""

    def __init__(self) -> None:
        self.handles: WeakSet[_Handle] = WeakSet()
        self._entered = threading.local()

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(tensor)
        self.handles.add(handle)
        return handle

    def __enter__(self) -> None:
        hooks = saved_tensors_hooks(self._pack, _Handle.unpack)
        hooks.__enter__()
        self._entered.__dict__.setdefault("stack", []).append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._entered.stack.pop().__exit__(*error)


def torch_leaves_alive(scenario: Scenario) -> bool:
    """Whether torch itself keeps the graph, with hooks that move nothing.

    It does after some errors of checkpoints, by cycles through C++, until a later backward.
    """
    hooks, ledger = _InertHooks(), Ledger(checkpoint=sound_checkpoint)
    play(scenario, (hooks, hooks), ledger)
    if ledger.alive() or hooks.handles:
        collect()
    return bool(ledger.alive() or hooks.handles)


def assert_same_events(ours: list[Event], plain: list[Event]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in plain]
    for (name, ours_seen), (_, plain_seen) in zip(ours, plain, strict=True):
        if isinstance(ours_seen, str) or isinstance(plain_seen, str):
            assert ours_seen == plain_seen, f"{name}: {ours_seen!r} instead of {plain_seen!r}"
            continue
        assert len(ours_seen) == len(plain_seen)
        for index, (a, b) in enumerate(zip(ours_seen, plain_seen, strict=True)):
            assert same(a, b), f"{name}, tensor {index}:\n{a}\ninstead of\n{b}"


def collect() -> None:
    """Cycles through the frames of raised errors, of checkpoints and of threads."""
    gc.collect()
