"""Torch's watch over synchronisations with the device, for tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronisations(mode: str) -> Iterator[None]:
    """Let torch "warn" of synchronisations, or make them an "error", until the block ends."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode(mode)
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Setting it warns once a process that the mode is a prototype, before anything is checked."""
    with warnings.catch_warnings():
        prototype = "Synchronization debug mode is a prototype feature"
        warnings.filterwarnings("ignore", prototype, UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
