"""How the kernels of the divergences are launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DivergenceLaunch:
    """`block` columns at a time by `warps` warps; a lane folds `group` neighbours on its own."""

    block: int = 1024
    warps: int = 4
    group: int = 1


FOLD_LAUNCH = DivergenceLaunch(group=8)
MIXTURE_LAUNCH = DivergenceLaunch()
GRADIENT_LAUNCH = DivergenceLaunch()
