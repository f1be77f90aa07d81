"""Packing over the whole dataset: TRL's strategies, without its windows of 1000 rows."""

from .plan import STRATEGIES, PackingPlan, PackingReport, Strategy, pack_lengths

__all__ = [
    "STRATEGIES",
    "PackingPlan",
    "PackingReport",
    "Strategy",
    "pack_lengths",
]
