"""Trainers of `trl.experimental` with lowpeak inside: change the import and nothing else.

As in TRL, each trainer is a module of its own (`lowpeak_trainers.experimental.orpo`), and importing
one imports `trl.experimental`, which warns that its interfaces may change. The names of all of them
can be had from here too, each imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cpo import CPOConfig, CPOTrainer
    from .gkd import GKDConfig, GKDTrainer
    from .orpo import ORPOConfig, ORPOTrainer

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "GKDConfig",
    "GKDTrainer",
    "ORPOConfig",
    "ORPOTrainer",
]

_MODULES = {
    "CPOConfig": "cpo",
    "CPOTrainer": "cpo",
    "GKDConfig": "gkd",
    "GKDTrainer": "gkd",
    "ORPOConfig": "orpo",
    "ORPOTrainer": "orpo",
}


def __getattr__(name: str) -> Any:
    # one module at a time: that of OnlineDPO imports vLLM where it is installed
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[name]}"))[name]
