"""How the kernels of the divergences are launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchShape:
    """`block` columns at a time by `warps` warps; a lane folds `group` neighbours on its own."""

    block: int
    warps: int
    group: int = 1


_shapes = {
    "fold": LaunchShape(1024, 4, 8),
    "mixture": LaunchShape(1024, 4),
    "gradient": LaunchShape(1024, 4),
}


def launch_shape(kernel: str) -> LaunchShape:
    """The shape of "fold", "mixture" or "gradient"."""
    return _shapes[kernel]


@contextmanager
def override_launch_shapes(**shapes: LaunchShape) -> Iterator[None]:
    """Use these shapes, by kernel, in every thread while the context is open. For measurements."""
    unknown = sorted(set(shapes) - set(_shapes))
    if unknown:
        raise ValueError(f"no kernel is called {unknown}: pass some of {sorted(_shapes)}")
    before = dict(_shapes)
    _shapes.update(shapes)
    try:
        yield
    finally:
        _shapes.update(before)
