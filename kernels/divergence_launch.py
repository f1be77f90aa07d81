"""How the kernels of the divergences are launched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DivergenceLaunch:
    """`block` columns at a time by `warps` warps; a lane folds `group` neighbours on its own."""

    block: int = 1024
    warps: int = 4
    group: int = 1


# The fastest on an H200 for float32 tiles of 512 x 65536 logits of both heads, or within 3 % of it
# for every divergence (benchmarks/tune_divergence.py): 2.5, 1.9 and 2.7 TB/s.
FOLD_LAUNCH = DivergenceLaunch(block=2048, warps=8, group=8)
MIXTURE_LAUNCH = DivergenceLaunch(block=2048, warps=8)
GRADIENT_LAUNCH = DivergenceLaunch(block=4096)
