"""Trainers of `trl.experimental` with lowpeak inside: change the import and nothing else.

As in TRL, each trainer is a module of its own (`lowpeak_trainers.experimental.orpo`), and its
interface may change in any release. The names of all of them can be had from here too, each
imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .a2po import A2POConfig, A2POTrainer
    from .cpo import CPOConfig, CPOTrainer
    from .gkd import GKDConfig, GKDTrainer
    from .gmpo import GMPOConfig, GMPOTrainer
    from .gold import GOLDConfig, GOLDTrainer
    from .online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from .orpo import ORPOConfig, ORPOTrainer
    from .tpo import TPOConfig, TPOTrainer

__all__ = [
    "A2POConfig",
    "A2POTrainer",
    "CPOConfig",
    "CPOTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GMPOConfig",
    "GMPOTrainer",
    "GOLDConfig",
    "GOLDTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "TPOConfig",
    "TPOTrainer",
]

_MODULES = {
    "A2PO": "a2po",
    "CPO": "cpo",
    "GKD": "gkd",
    "GMPO": "gmpo",
    "GOLD": "gold",
    "ORPO": "orpo",
    "OnlineDPO": "online_dpo",
    "TPO": "tpo",
}


def __getattr__(name: str) -> Any:
    # one module at a time: that of OnlineDPO imports vLLM where it is installed
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    method = name.removesuffix("Config").removesuffix("Trainer")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[method]}"))[name]
