"""The order in which saved tensors come back: each forward's order of saving, reversed."""

import weakref
from collections import defaultdict
from collections.abc import Iterator

import torch

from lowpeak.offload.pending import Pending
from lowpeak.offload.unit import Unit, UnitReference


class Generation:
    """The units of one forward, in the order in which they were saved, one chain a device.

    Nothing is ever fetched across generations. The chain holds weak references: what the graph
    let go is skipped.
    """

    __slots__ = ("__weakref__", "chains", "found_on_device", "made", "pending", "unpacked")

    def __init__(self) -> None:
        self.chains: dict[torch.device, list[UnitReference]] = defaultdict(list)
        self.pending = Pending()
        self.made = 0
        self.found_on_device: dict[int, int] = {}
        self.unpacked = False

    def append(self, unit: Unit, *, new: bool) -> int:
        """Put a unit at the end of its device's chain; its position there."""
        chain = self.chains[unit.device]
        chain.append(weakref.ref(unit))
        if new:
            unit.place = self.made
            self.pending.append(unit)
            self.made += 1
        return len(chain) - 1

    def away_before(self, device: torch.device, position: int) -> Iterator[Unit]:
        """The units on the host only that were saved before a position, the nearest first."""
        chain = self.chains[device]
        while len(chain) > position + 1 and chain[-1]() is None:
            chain.pop()
        for place in range(min(position, len(chain)) - 1, -1, -1):
            unit = chain[place]()
            # Most of those ahead are on their way, which is the cheaper question.
            if unit is not None and unit.arriving is None and unit.is_away:
                yield unit

    def close(self) -> None:
        """A newer forward began: give up what was fetched ahead and never asked for."""
        for chain in self.chains.values():
            for reference in chain:
                unit = reference()
                if unit is not None:
                    unit.discard_arriving()
