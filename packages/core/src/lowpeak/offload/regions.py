"""The checkpoints that a thread is inside of, and how those end that an error left.

Up to torch 2.11 a checkpoint whose function raises leaves its generator to the garbage collector,
with its saved-tensor hooks and dispatch modes above those of whoever catches the error. Ending it
takes the uppermost off the thread's stacks, which are its own only where it put them:
* one that began in forward, in its thread and outside of backward;
* one that began in backward, until autograd puts the thread's stacks back as they were when
  backward began, which it does after each node.
Anywhere else it is given copies of what it put there, to take off.
"""

import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _push_mode,
)

_numbers = itertools.count(1)


class Regions(threading.local):
    """Those of a thread that have begun and not ended, outermost first."""

    def __init__(self) -> None:
        self.running: list[Region] = []

    def newest(self) -> int:
        """The number of the innermost; those that begin later have greater ones."""
        return self.running[-1].number if self.running else 0

    def hide(self, number: int) -> bool:
        """Whether hooks of a later one than that of a number lie above those of its time."""
        return any(one.number > number and one.hides for one in self.running)

    @contextmanager
    def all_ended(self) -> Iterator[None]:
        """End the checkpoints that an error inside left."""
        newest = self.newest()
        try:
            yield
        finally:
            for region in reversed(self.running.copy()):
                if region.number > newest:
                    region.abandon()


regions = Regions()


class Region:
    """A run of the generator that both halves of a non-reentrant checkpoint go through."""

    def __init__(self, halves: Generator[None, None, None]) -> None:
        self.number = next(_numbers)
        self._halves = halves
        self._list = regions.running
        self._in_backward = torch._C._current_graph_task_id() != -1
        self._hooks: Any = None
        self._modes: list[TorchDispatchMode] = []

    def begin(self) -> None:
        """The first half, up to the forward."""
        hooks, modes = _pack_hook(), _get_current_dispatch_mode_stack()
        next(self._halves)
        self._hooks = None if _pack_hook() is hooks else _pack_hook()
        self._modes = _get_current_dispatch_mode_stack()[len(modes) :]

    @contextmanager
    def running(self) -> Iterator[None]:
        """The forward, and the second half after it, or at its error."""
        self._list.append(self)
        try:
            yield
        except GeneratorExit:
            self.abandon()
            raise
        except BaseException as error:
            self._list.remove(self)
            self._halves.throw(error)
            raise
        self._list.remove(self)
        for _ in self._halves:
            raise AssertionError("torch's checkpoint generator yielded twice")

    @property
    def hides(self) -> bool:
        """Whether its hooks, in forward, are called in place of those outside."""
        return self._hooks is not None and not self._in_backward

    def abandon(self) -> None:
        """End it though its forward did not, wherever this is called from; once."""
        in_backward = torch._C._current_graph_task_id() != -1
        here = self._list is regions.running
        if not self._in_backward and (in_backward or not here):
            # The context that it began under ends it, with its thread's stacks as they are then.
            return
        if self not in self._list:
            return
        self._list.remove(self)
        if self._in_backward and not (here and self._hooks is _pack_hook()):
            self._give_copies()
        self._halves.close()

    def _give_copies(self) -> None:
        """Put hooks and modes on this thread's stacks, for closing to take off."""
        if self._hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(_unused, _unused)
        for mode in self._modes:
            _push_mode(mode)


def _pack_hook() -> Any:
    """The thread's innermost pack hook, or None."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _unused(value: Any) -> Any:
    raise AssertionError("a hook that only its removal was meant for")
