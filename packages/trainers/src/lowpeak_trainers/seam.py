"""The seam into TRL: its trainers ask a module global for their fused LM head; we answer.

TRL refuses an adapter on the head, which it finds by the module global `BaseTunerLayer`: that is
replaced too. Both are replaced only while a trainer is being built, because reference models are
made and their log-probabilities precomputed inside `__init__`. `pack_dataset` is replaced while a
dataset is prepared, there and in `evaluate`. What replaces them looks up the installer or packer of
its own context, so trainers built by other threads at the same time keep what TRL has. The same
holds for `__init__` of TRL's trainers, replaced while `enabled()` lasts.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from .compatibility import (
    DISTILLATION_MODULE,
    HEAD_NAME,
    PACK_NAME,
    PACKING_MODULE,
    REWARD_MODULE,
    SEAM_MODULES,
    TRAINER_CLASSES,
    TUNER_NAME,
)


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


class PackFunction(Protocol):
    """Signature of TRL's `pack_dataset`."""

    def __call__(
        self,
        dataset: Any,
        seq_length: int,
        strategy: str = "bfd",
        map_kwargs: dict[str, Any] | None = None,
    ) -> Any: ...


_installer: ContextVar[Installer | None] = ContextVar("lowpeak_head_installer", default=None)
# Whether the installer's heads take adapters along.
_takes_adapters: ContextVar[bool] = ContextVar("lowpeak_head_takes_adapters", default=False)
_packer: ContextVar[PackFunction | None] = ContextVar("lowpeak_packer", default=None)


def _installing(stock: FusedHeadFunction) -> FusedHeadFunction:
    """Asks the installer of the context for the head, or `stock` where there is none."""

    def add_fused_lm_head(
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        installer = _installer.get()
        if installer is None:
            stock(model, temperature, cast_lm_head_to_fp32, outputs)
        else:
            installer(stock, model, temperature, cast_lm_head_to_fp32, outputs)

    return add_fused_lm_head


def _stand_in(tuner_layer: type) -> type:
    """A class for PEFT's, of which a layer is no instance where adapters are taken along."""

    class StandIn(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return not _takes_adapters.get() and isinstance(instance, tuner_layer)

    return StandIn(tuner_layer.__name__, (), {})


def _packing(stock: PackFunction) -> PackFunction:
    """Lets the packer of the context pack, or `stock` where there is none."""

    def pack_dataset(
        dataset: Any,
        seq_length: int,
        strategy: str = "bfd",
        map_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return (_packer.get() or stock)(dataset, seq_length, strategy, map_kwargs)

    return pack_dataset


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    HEAD_NAME: _installing,
    TUNER_NAME: _stand_in,
    PACK_NAME: _packing,
}


class ModuleSeam:
    """Replaces the globals of one TRL module for as long as anyone uses it."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name
        self._lock = threading.Lock()
        self._users = 0
        self._stock: dict[str, Any] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Replace the globals; the last user to leave puts back what was found."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._users == 0:
                module = importlib.import_module(self._module_name)
                found = vars(module)
                self._stock = {name: found[name] for name in _REPLACEMENTS if name in found}
                for name, stock in self._stock.items():
                    setattr(module, name, _REPLACEMENTS[name](stock))
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for name, stock in self._stock.items():
                    setattr(sys.modules[self._module_name], name, stock)
                self._stock = {}


# TRL's DistillationTrainer asks for no head, but refuses an adapter on it like the others.
SEAMS = {name: ModuleSeam(name) for name in (*SEAM_MODULES, DISTILLATION_MODULE)}


@contextmanager
def heads_from(
    installer: Installer,
    module_names: Iterable[str] = SEAM_MODULES,
    takes_adapters: bool = False,
) -> Iterator[None]:
    """Let `installer` make the fused heads of the trainers built in this context.

    `module_names` are the TRL modules to replace the globals in, a subset of SEAMS. With
    `takes_adapters`, TRL does not refuse an adapter on the head.
    """
    token, adapters = _installer.set(installer), _takes_adapters.set(takes_adapters)
    try:
        with ExitStack() as stack:
            for name in module_names:
                stack.enter_context(SEAMS[name].open())
            yield
    finally:
        _takes_adapters.reset(adapters)
        _installer.reset(token)


@contextmanager
def datasets_packed_by(packer: PackFunction) -> Iterator[None]:
    """Let `packer` pack the datasets that SFTTrainer prepares in this context."""
    token = _packer.set(packer)
    try:
        with SEAMS[PACKING_MODULE].open():
            yield
    finally:
        _packer.reset(token)


class Builder(Protocol):
    """Builds `trainer` by calling `init`, which is TRL's own `__init__`, with these arguments."""

    def __call__(
        self, trainer: Any, init: Callable[..., None], args: Any, kwargs: dict[str, Any]
    ) -> None: ...


_builder: ContextVar[Builder | None] = ContextVar("lowpeak_trainer_builder", default=None)


class ConstructorSeam:
    """Replaces `__init__` of a TRL trainer for as long as anyone uses it."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name
        self._lock = threading.Lock()
        self._users = 0
        self._stock: Callable[..., None] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Replace `__init__`; the last user to leave puts back what was found."""
        with self._lock:
            if self._users == 0:
                self._stock = self._trainer_class.__init__
                self._trainer_class.__init__ = _dispatching(self._stock)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._trainer_class.__init__ = self._stock

    @property
    def _trainer_class(self) -> Any:
        module = importlib.import_module(self._module_name)
        return vars(module)[TRAINER_CLASSES[self._module_name]]


def _dispatching(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        builder = _builder.get()
        if builder is None:
            stock(trainer, *args, **kwargs)
        else:
            builder(trainer, functools.partial(stock, trainer), args, kwargs)

    return init


CONSTRUCTOR_SEAMS = tuple(ConstructorSeam(name) for name in TRAINER_CLASSES)


@contextmanager
def trainers_from(builder: Builder) -> Iterator[None]:
    """Let `builder` build TRL's trainers in this context."""
    token = _builder.set(builder)
    try:
        with ExitStack() as stack:
            for seam in CONSTRUCTOR_SEAMS:
                stack.enter_context(seam.open())
            yield
    finally:
        _builder.reset(token)


def trl_modules_of(trainer_class: type) -> tuple[str, ...]:
    """Names of the supported TRL modules whose trainers `trainer_class` is derived from."""
    supported = (*SEAM_MODULES, DISTILLATION_MODULE, REWARD_MODULE)
    return tuple(
        parent.__module__
        for parent in trainer_class.__mro__
        if parent.__module__ in supported and "__init__" in vars(parent)
    )
