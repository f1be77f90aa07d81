"""Packing over the whole dataset: TRL's strategies, without its windows of 1000 rows."""

from .dataset import pack_dataset
from .plan import STRATEGIES, PackingPlan, PackingReport, Strategy, pack_lengths

__all__ = [
    "STRATEGIES",
    "PackingPlan",
    "PackingReport",
    "Strategy",
    "pack_dataset",
    "pack_lengths",
]
