"""Torch's watch over synchronisations with the device, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronisations(mode: str) -> Iterator[None]:
    """Let torch "warn" of synchronisations, or make them an "error", until the block ends."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
