"""Triton where it is installed, and a `jit` that leaves functions alone where it is not.

Triton ships with torch on Linux only. The kernels beside their torch twins must import without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import triton
    import triton.language as tl
except ImportError:
    TRITON_AVAILABLE = False
    tl = None  # kernels name it in their bodies only

    def jit(function: Function) -> Any:
        """Return `function` unchanged: without Triton it is never launched."""
        return function

else:
    TRITON_AVAILABLE = True
    jit = triton.jit

__all__ = ["TRITON_AVAILABLE", "jit", "tl"]
