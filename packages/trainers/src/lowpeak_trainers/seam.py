"""The seam into TRL: its trainers ask a module global for their fused LM head; we answer.

The global is replaced only while a trainer is being built, because reference models are made and
their log-probabilities precomputed inside `__init__`. What replaces it looks up the installer of
its own context, so trainers built by other threads at the same time keep the head of TRL.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import nn

from .compatibility import DISTILLATION_MODULE, HEAD_NAME, REWARD_MODULE, SEAM_MODULES


class FusedHeadFunction(Protocol):
    """Signature of TRL's `add_fused_lm_head`."""

    def __call__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None: ...


class Installer(Protocol):
    """Gives `model` a fused head; may pass the call on to `stock`, TRL's own function."""

    def __call__(
        self,
        stock: FusedHeadFunction,
        model: nn.Module,
        temperature: float,
        cast_lm_head_to_fp32: bool,
        outputs: tuple[str, ...],
    ) -> None: ...


_installer: ContextVar[Installer | None] = ContextVar("lowpeak_head_installer", default=None)


class ModuleSeam:
    """Replaces `add_fused_lm_head` of one TRL module for as long as anyone uses it."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name
        self._lock = threading.Lock()
        self._users = 0
        self._stock: FusedHeadFunction | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Replace the global; the last user to leave puts back what was found."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._users == 0:
                module = importlib.import_module(self._module_name)
                self._stock = vars(module)[HEAD_NAME]
                setattr(module, HEAD_NAME, self._dispatch)
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                setattr(sys.modules[self._module_name], HEAD_NAME, self._stock)
                self._stock = None

    def _dispatch(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        stock = self._stock
        assert stock is not None, "the replacement outlived its seam"
        installer = _installer.get()
        if installer is None:
            stock(model, temperature, cast_lm_head_to_fp32, outputs)
        else:
            installer(stock, model, temperature, cast_lm_head_to_fp32, outputs)


SEAMS = {name: ModuleSeam(name) for name in SEAM_MODULES}


@contextmanager
def heads_from(installer: Installer, module_names: Iterable[str] = SEAM_MODULES) -> Iterator[None]:
    """Let `installer` make the fused heads of the trainers built in this context.

    `module_names` are the TRL modules to replace the global in, a subset of SEAM_MODULES.
    """
    token = _installer.set(installer)
    try:
        with ExitStack() as stack:
            for name in module_names:
                stack.enter_context(SEAMS[name].open())
            yield
    finally:
        _installer.reset(token)


def trl_modules_of(trainer_class: type) -> tuple[str, ...]:
    """Names of the supported TRL modules whose trainers `trainer_class` is derived from."""
    supported = (*SEAM_MODULES, DISTILLATION_MODULE, REWARD_MODULE)
    return tuple(
        parent.__module__
        for parent in trainer_class.__mro__
        if parent.__module__ in supported and "__init__" in vars(parent)
    )
