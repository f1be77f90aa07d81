"""Computations whose saved tensors an open context leaves where they are."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class _ThreadState(threading.local):
    depth = 0


_state = _ThreadState()


def kept_on_device() -> AbstractContextManager[None]:
    """Around a computation that backward begins with, such as a head.

    What autograd saves inside is asked for before a copy would be worth it, so that an
    `OffloadActivations` around it keeps it on its device. Without one, and in compiled code, where
    contexts are inert, this does nothing.
    """
    return nullcontext() if torch.compiler.is_compiling() else _kept()


@contextmanager
def _kept() -> Iterator[None]:
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def is_kept() -> bool:
    """Whether this thread runs such a computation."""
    return _state.depth > 0
