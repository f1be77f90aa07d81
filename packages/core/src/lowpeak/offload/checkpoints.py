"""What torch.utils.checkpoint keeps, seen from outside of it.

Saved-tensor hooks see the tensors among a checkpoint's positional arguments. They do not see that
these are a checkpoint's inputs, nor tensors in lists, dicts, keyword arguments or the arguments of
a functools.partial (transformers hands a layer's keywords over in one), which stay referenced by
the closure that recomputes, nor what a selective checkpoint keeps in its own dictionary.

So while a context is open, the generator that both halves of a non-reentrant checkpoint run
through, `torch.utils.checkpoint._checkpoint_without_reentrant_generator`, is exchanged for one that
runs it with those tensors as further positional arguments. Threads without an open context run the
original unchanged. The name is private to torch: `check_torch` says if it is not what it was. An
input that is reached this way counts as saved, so changing it in place before backward raises.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowpeak.offload.handle import Packed
from lowpeak.offload.regions import Region, regions
from lowpeak.offload.selective import Selective

GENERATOR = "_checkpoint_without_reentrant_generator"


class Listener(Protocol):
    """An open context, as checkpoints see it."""

    def could_move(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that torch keeps out of sight is worth packing."""

    def pack_selective(self, tensor: torch.Tensor, version: int) -> Packed:
        """Pack what a selective checkpoint keeps."""

    def selective_stays(self, tensor: torch.Tensor) -> None:
        """A selective checkpoint keeps a tensor that cannot be packed."""


class _Entry:
    """A context, or None where checkpoints are only to be ended, and what lay outside of it."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self._outside = regions.newest()

    @property
    def listener(self) -> Listener | None:
        """The context; inside of a checkpoint none, whose own hooks hide the context's."""
        return None if regions.hide(self._outside) else self._listener


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.saving_inputs = False


_state = _ThreadState()
_lock = threading.Lock()
_open_contexts = 0
_original: Callable[..., Generator[None, None, None]] | None = None
_original_options: list[str] = []


def check_torch() -> None:
    """Raise RuntimeError where torch's checkpoint is not built as this module knows it."""
    generator = getattr(torch_checkpoint, GENERATOR, None)
    kinds = {}
    if generator is not None:
        parameters = inspect.signature(generator).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
    if (
        list(kinds)[:1] != ["fn"]
        or "context_fn" not in kinds
        or list(kinds.values())[-2:] != [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    ):
        raise RuntimeError(
            f"torch {torch.__version__}: torch.utils.checkpoint.{GENERATOR} takes {list(kinds)}, "
            "not fn, options with a context_fn among them, *args and **kwargs; use a torch that "
            "lowpeak supports"
        )


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Tell this thread's checkpoints about a context, or about none; left in any order."""
    _install()
    entry = _Entry(listener)
    _state.entries.append(entry)
    try:
        yield
    finally:
        _state.entries.remove(entry)
        _uninstall()


def _install() -> None:
    global _open_contexts, _original, _original_options
    with _lock:
        if _open_contexts == 0:
            if getattr(torch_checkpoint, GENERATOR, None) is not _generator:
                check_torch()
                _original = getattr(torch_checkpoint, GENERATOR)
                # all but *args and **kwargs; asked once, not for each checkpoint
                _original_options = list(inspect.signature(_original).parameters)[:-2]
            setattr(torch_checkpoint, GENERATOR, _generator)
        _open_contexts += 1


def _uninstall() -> None:
    global _open_contexts
    with _lock:
        _open_contexts -= 1
        # Where somebody exchanged the name after us, theirs stays, and calls ours, which hands on.
        if _open_contexts == 0 and getattr(torch_checkpoint, GENERATOR) is _generator:
            setattr(torch_checkpoint, GENERATOR, _original)


def is_checkpoint_saving() -> bool:
    """Whether the pack hook is being called for the inputs of a checkpoint.

    A reentrant checkpoint is an autograd.Function; the hook is called straight out of its `apply`.
    """
    return _state.saving_inputs or _reentrant_function_is_saving()


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


# Frames between autograd and here: the hook, and what torch.compiler.disable wraps around it.
_OUR_FRAMES = ("lowpeak.offload", "torch._dynamo")


def _reentrant_function_is_saving() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"].startswith(_OUR_FRAMES):
        frame = frame.f_back
    if frame is None or frame.f_code is not _APPLY:
        return False
    return frame.f_locals["cls"] is torch_checkpoint.CheckpointFunction


def _generator(*values: Any, **kwargs: Any) -> Iterator[None]:
    """Torch's generator: runs up to its one yield before the forward, and to its end after it."""
    assert _original is not None
    if not _state.entries:
        yield from _original(*values, **kwargs)
        return
    # torch.utils.checkpoint.checkpoint gives fn and all options by position.
    names = _original_options
    options, args = dict(zip(names, values, strict=False)), values[len(names) :]
    listener = _state.entries[-1].listener
    if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
        listener = None
    if listener is None:
        options["fn"] = functools.partial(_recompute, options["fn"])
        region = Region(_original(*options.values(), *args, **kwargs))
        region.begin()
        with region.running():
            yield
        return
    options["fn"], args = _Call.exposed(listener, options["fn"], args, kwargs)
    selective = Selective(options["context_fn"])
    if options["context_fn"] is not torch_checkpoint.noop_context_fn:
        options["context_fn"] = selective.contexts
    region = Region(_original(*options.values(), *args))
    _state.saving_inputs = True
    try:
        region.begin()
    finally:
        _state.saving_inputs = False
    with region.running():
        yield
    selective.pack(listener)


def _recompute(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what a checkpoint recomputes; the checkpoints inside that an error leaves end here."""
    with listening(None), regions.all_ended():
        return fn(*args, **kwargs)


class _Nested:
    """An argument in which tensors were replaced by their places among the positional ones."""

    def __init__(self, leaves: list[Any], places: Mapping[int, int], spec: TreeSpec) -> None:
        self._leaves = leaves
        self._places = places
        self._spec = spec

    def filled(self, tensors: tuple[Any, ...]) -> Any:
        """The argument again, with these tensors."""
        leaves = list(self._leaves)
        for leaf, place in self._places.items():
            leaves[leaf] = tensors[place]
        return tree_unflatten(leaves, self._spec)


class _Hiding:
    """Collects the tensors that are out of sight, to put them behind the positional arguments."""

    def __init__(self, listener: Listener, count: int) -> None:
        self._listener = listener
        self._count = count
        self.tensors: list[torch.Tensor] = []

    def without(self, value: Any) -> Any:
        """The value itself, or the same with large activations taken out."""
        leaves, spec = tree_flatten(value)
        places = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self._listener.could_move(leaf):
                places[number] = self._count + len(self.tensors)
                self.tensors.append(leaf)
                leaves[number] = None
        return _Nested(leaves, places, spec) if places else value

    def without_each(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same for every value of a dict."""
        return {key: self.without(value) for key, value in values.items()}


class _Call:
    """A checkpointed call without the tensors that it is to get by position: it holds none."""

    def __init__(
        self,
        fn: Callable[..., Any],
        count: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._fn = fn
        self._count = count
        self._args = args
        self._kwargs = kwargs

    @classmethod
    def exposed(
        cls,
        listener: Listener,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What recomputes, and the positional arguments to give it.

        Arguments in which nothing is worth moving are handed on as they are, the same objects.
        """
        hiding = _Hiding(listener, len(args))
        bound: tuple[Any, ...] = ()
        named = hiding.without_each(kwargs)
        if isinstance(fn, functools.partial):
            bound = tuple(hiding.without(value) for value in fn.args)
            named = hiding.without_each(fn.keywords) | named
            fn = fn.func
        given = [
            value if isinstance(value, torch.Tensor) else hiding.without(value) for value in args
        ]
        return cls(fn, len(args), bound, named).recompute, (*given, *hiding.tensors)

    def recompute(self, *tensors_and_args: Any) -> Any:
        """Call the function as the forward did."""

        def filled(value: Any) -> Any:
            return value.filled(tensors_and_args) if isinstance(value, _Nested) else value

        args = (*self._args, *tensors_and_args[: self._count])
        return _recompute(
            self._fn,
            *(filled(value) for value in args),
            **{key: filled(value) for key, value in self._kwargs.items()},
        )
