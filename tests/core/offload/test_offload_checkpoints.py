"""Checkpoints of every kind under the offload helper: what they keep is found and moved."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowpeak.offload import OffloadActivations, SimEngine, checkpoints, selective
from lowpeak.offload.regions import regions

SHAPE = (16, 16)
BYTES = 16 * 16 * 4
LAYERS = 5


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def positional(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    return checkpoint(layer, x, extra, use_reentrant=False)


def reentrant(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    return checkpoint(layer, x, extra, use_reentrant=True)


def keyword(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    return checkpoint(layer, x, extra=extra, use_reentrant=False)


def in_partial(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    """As transformers' GradientCheckpointingLayer hands keywords over."""
    return checkpoint(functools.partial(layer, extra=extra), x, use_reentrant=False)


def nested_keyword(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    def unwrap(state: Tensor, *, more: dict[str, Any]) -> Tensor:
        assert more["none"] is None
        assert more["name"] == "name"
        return layer(state, more["list"][0].second)

    more = {"list": [Pair(x, extra)], "none": None, "name": "name"}
    return checkpoint(unwrap, x, more=more, use_reentrant=False)


def nested_positional(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
    return checkpoint(lambda pair: layer(pair[0], pair[1][0]), (x, [extra]), use_reentrant=False)


WAYS = [positional, reentrant, keyword, in_partial, nested_keyword, nested_positional]


class Layer(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x + extra)))


def gradients(
    way: Callable[..., Tensor], context: AbstractContextManager[object]
) -> tuple[Tensor, ...]:
    layers = torch.nn.ModuleList([Layer(seed) for seed in range(LAYERS)])
    torch.manual_seed(LAYERS)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        state = x * 1
        for layer in layers:
            state = way(layer, state, state.sin())
        loss = state.square().mean()
    loss.backward()
    return tuple(leaf.grad for leaf in (x, *layers.parameters()) if leaf.grad is not None)


def offload(mode: Any = "laziest", **options: Any) -> OffloadActivations:
    chosen = {"policy": "checkpoint_inputs", "min_bytes": 1, "device_backend": SimEngine(mode=mode)}
    return OffloadActivations(**{**chosen, **options})


@pytest.mark.parametrize("policy", ["checkpoint_inputs", "auto"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_inputs_are_found_wherever_they_hide(way: Callable[..., Tensor], policy: str) -> None:
    context = offload(policy=policy, window_bytes=BYTES)
    plain = gradients(way, nullcontext())
    for ours, theirs in zip(gradients(way, context), plain, strict=True):
        assert torch.equal(ours, theirs)
    stats = context.stats()
    # Of each layer its state and the extra tensor; only the last range of all stays.
    assert stats.offloaded.count == 2 * LAYERS
    assert stats.copied_out.count == 2 * LAYERS - 1
    assert stats.host_bytes == 0


def test_what_is_not_moved_is_handed_on_as_it_is() -> None:
    """Containers without anything to move stay the same objects, also in the recomputation."""
    marker: dict[str, Any] = {"calls": 0, "mask": torch.ones(SHAPE), "ids": [torch.arange(4)]}

    def layer(x: Tensor, *, notes: dict[str, Any]) -> Tensor:
        notes["calls"] += 1
        return (x * notes["mask"]).sin()

    x = torch.randn(SHAPE, requires_grad=True)
    with offload():
        out = checkpoint(layer, x * 1, notes=marker, use_reentrant=False)
    out.sum().backward()
    assert marker["calls"] == 2


def test_hidden_inputs_leave_the_device() -> None:
    """The closure that recomputes holds no tensor that was moved."""
    context = offload(mode="eager", keep_last=0)
    layer = Layer(0)
    alive: list[Any] = []
    with context:
        x = torch.randn(SHAPE, requires_grad=True) * 1
        extra = x.sin()
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(extra.untyped_storage()))
        out = checkpoint(functools.partial(layer, extra=extra), x, use_reentrant=False)
        del extra
        out = out.square()
    gc.collect()
    # The sine's own graph saves x, not the extra tensor.
    assert alive[0].expired()
    out.sum().backward()


def test_hidden_inputs_changed_in_place_raise() -> None:
    """Plain torch would recompute from the changed value, and give another gradient, silently."""
    x = torch.randn(SHAPE, requires_grad=True)
    with offload(keep_last=0):
        extra = x.sin()
        out = keyword(Layer(0), x * 1, extra)
    with torch.no_grad():
        extra.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def selective_way(allow: bool = False, **extra: Any) -> Callable[..., Tensor]:
    saved = [torch.ops.aten.addmm.default, torch.ops.aten.gelu.default]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(saved, allow_cache_entry_mutation=allow)

    def selective_checkpoint(layer: Callable[..., Tensor], x: Tensor, extra: Tensor) -> Tensor:
        return checkpoint(layer, x, extra, use_reentrant=False, context_fn=contexts)

    return selective_checkpoint


@pytest.mark.parametrize("mode", ["laziest", "eager", "random"])
def test_selectively_saved_tensors_move(mode: str) -> None:
    way = selective_way()
    plain = gradients(way, nullcontext())
    context = offload(mode=mode, keep_last=0)
    for ours, theirs in zip(gradients(way, context), plain, strict=True):
        assert torch.equal(ours, theirs)
    stats = context.stats()
    # Two products and one activation a layer; the second product is the layer's result plus x.
    assert stats.selective.count == 3 * LAYERS
    assert stats.offloaded.count == 5 * LAYERS
    assert stats.host_bytes == 0


def test_selective_tensors_that_may_change_stay() -> None:
    context = offload(keep_last=0)
    way = selective_way(allow=True)
    for ours, theirs in zip(gradients(way, context), gradients(way, nullcontext()), strict=True):
        assert torch.equal(ours, theirs)
    assert context.stats().selective.count == 0
    assert context.stats().kept["selective"].count == 3 * LAYERS


def test_selective_tensors_changed_in_place_raise_as_in_torch() -> None:
    kept: list[Tensor] = []

    def layer(x: Tensor, extra: Tensor) -> Tensor:
        product = torch.addmm(extra, x, x)
        kept.append(product)
        return product.sin()

    def error(context: AbstractContextManager[object]) -> str:
        kept.clear()
        x = torch.randn(SHAPE, requires_grad=True)
        with context:
            out = selective_way()(layer, x * 1, x.cos())
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError) as raised:
            out.sum().backward()
        return str(raised.value)

    assert error(offload(keep_last=0)) == error(nullcontext()) == selective.MUTATED


def test_names_of_torch_that_the_helper_needs() -> None:
    """Private names of torch: where one is gone, `with` raises and this test names it."""
    checkpoints.check_torch()
    selective.check_torch()
    assert torch._C._current_graph_task_id() == -1
    assert not torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(1))
    storage = torch.ones(1).untyped_storage()
    reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
    assert reference.cdata == storage._cdata
    assert torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes() == 4


@pytest.mark.parametrize("found", [lambda fn: None, None])
def test_another_checkpoint_of_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    monkeypatch.setattr(torch_checkpoint, checkpoints.GENERATOR, found)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint\._checkpoint_without"):
        offload().__enter__()
    assert getattr(torch_checkpoint, checkpoints.GENERATOR) is found


def test_torch_is_as_before_after_the_context() -> None:
    original = getattr(torch_checkpoint, checkpoints.GENERATOR)
    context = offload()
    with context:
        with offload():
            assert getattr(torch_checkpoint, checkpoints.GENERATOR) is not original
        with pytest.raises(KeyError), offload():
            raise KeyError
        assert getattr(torch_checkpoint, checkpoints.GENERATOR) is not original
    assert getattr(torch_checkpoint, checkpoints.GENERATOR) is original


def test_an_error_inside_of_a_checkpoint_leaves_nothing() -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("broken")

    context = offload(keep_last=0)
    for _ in range(2):
        with pytest.raises(KeyError), context:
            checkpoint(broken, torch.randn(SHAPE, requires_grad=True) * 1, use_reentrant=False)
    assert context.stats().host_bytes == 0
    plain = gradients(positional, nullcontext())
    for ours, theirs in zip(gradients(positional, context), plain, strict=True):
        assert torch.equal(ours, theirs)


def checkpoint_of_torch_2_11(
    function: Callable[..., Tensor], *args: Any, context_fn: Any = None
) -> Tensor:
    """Does not tell its generator of an error: that waits where the error's frames keep it."""
    contexts = context_fn or torch_checkpoint.noop_context_fn
    options = (True, contexts, "default", False, True)
    generator = getattr(torch_checkpoint, checkpoints.GENERATOR)(function, *options, *args)
    next(generator)
    result = function(*args)
    with pytest.raises(StopIteration):
        next(generator)
    return result


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("selective_too", [False, True])
def test_an_error_leaves_no_hook_though_its_frames_live_on(
    nested: bool, selective_too: bool
) -> None:
    def broken(x: Tensor) -> Tensor:
        raise KeyError("broken")

    options: dict[str, Any] = {}
    if selective_too:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor]
        )

    def outer(x: Tensor) -> Tensor:
        return checkpoint_of_torch_2_11(broken, x * 2, **options)

    function = outer if nested else broken
    with pytest.raises(KeyError) as error, offload():
        checkpoint_of_torch_2_11(function, torch.randn(SHAPE, requires_grad=True) * 1, **options)
    # the frames, and their generators, are alive
    assert error.value.__traceback__ is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert regions.running == []
    plain = gradients(positional, nullcontext())
    for ours, theirs in zip(gradients(positional, offload()), plain, strict=True):
        assert torch.equal(ours, theirs)


def reentrant_of_one(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def fails_when_recomputed(x: Tensor) -> Tensor:
    y = x.exp()
    if torch._C._current_graph_task_id() != -1:
        raise KeyError("broken")
    return y * y


def raises_in_backward(
    inner: Callable[[Tensor], Tensor], outer: Callable[..., Tensor], inside: bool
) -> pytest.ExceptionInfo[KeyError]:
    """The error, whose frames hold the generator of the inner checkpoint."""
    x = torch.randn(SHAPE, requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(offload())
        out = outer(lambda v: inner(v * 2).sin(), x * 1)
        if not inside:
            stack.close()
        with pytest.raises(KeyError) as error:
            out.sum().backward()
    return error


INNER = [
    functools.partial(checkpoint_of_torch_2_11, fails_when_recomputed),
    functools.partial(
        checkpoint_of_torch_2_11,
        fails_when_recomputed,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor]
        ),
    ),
]


def stacks() -> tuple[object, list[TorchDispatchMode]]:
    """The hooks and the modes of this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks, _get_current_dispatch_mode_stack()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("outer", "inside"),
    # Torch runs the inside of a reentrant one outside of any context, if backward is.
    [
        (checkpoint_of_torch_2_11, False),
        (checkpoint_of_torch_2_11, True),
        (reentrant_of_one, True),
    ],
)
def test_an_error_in_recomputation_takes_nothing_off_later(
    inner: Callable[[Tensor], Tensor], outer: Callable[..., Tensor], inside: bool
) -> None:
    """Autograd has put hooks and modes back when the generator that the error left is collected."""
    errors = [raises_in_backward(inner, outer, inside) for _ in range(2)]
    assert regions.running == []
    assert stacks() == (None, [])

    def drop() -> None:
        with saved_tensors_hooks(lambda x: x, lambda x: x), Passing():
            before = stacks()
            errors.pop()
            gc.collect()
            assert stacks() == before

    drop()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(drop).result()
    assert stacks() == (None, [])
    plain = gradients(positional, nullcontext())
    for ours, theirs in zip(gradients(positional, offload()), plain, strict=True):
        assert torch.equal(ours, theirs)
