"""Units whose copies out were not issued: the newest of a forward, and what more is to stay."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from lowpeak.offload.unit import Unit, UnitReference


class _Waiting(NamedTuple):
    number: int
    reference: UnitReference


class Pending:
    """Those of one forward, oldest first, and the bytes of those that live, for each device."""

    __slots__ = ("_bytes", "_bytes_of", "_gone", "_queues")

    def __init__(self) -> None:
        self._queues: dict[torch.device, deque[_Waiting]] = defaultdict(deque)
        self._bytes: dict[torch.device, int] = defaultdict(int)
        self._bytes_of: dict[int, int] = {}
        # The end of a unit may interrupt anything, so it is only queued.
        self._gone: deque[tuple[torch.device, int]] = deque()

    def append(self, unit: Unit) -> None:
        """A unit, newer than all before."""
        ended = partial(_note_end, self._gone, unit.device, unit.place)
        self._queues[unit.device].append(_Waiting(unit.place, weakref.ref(unit, ended)))
        self._bytes_of[unit.place] = 0
        unit.pending = self
        self.measure(unit)

    def measure(self, unit: Unit) -> None:
        """Look at a unit's bytes, which grow while it takes in further views."""
        before = self._bytes_of.get(unit.place)
        if before is not None:
            self._bytes[unit.device] += unit.nbytes - before
            self._bytes_of[unit.place] = unit.nbytes

    def bytes(self, device: torch.device) -> int:
        """Bytes of those on a device."""
        self._settle()
        return self._bytes[device]

    def all_bytes(self) -> int:
        """Bytes of those on all devices."""
        self._settle()
        return sum(self._bytes.values())

    def leaving(self, newest: int, keep_bytes: int, stays: Callable[[int], bool]) -> Iterator[Unit]:
        """Take out those to copy now, oldest first.

        Units numbered `newest` and above stay, and as many before them as hold at most `keep_bytes`
        on their device; `stays` is asked whether the oldest of the others does, and all after it.
        """
        for device, queue in list(self._queues.items()):
            while queue and queue[0].number < newest:
                number, reference = queue[0]
                unit = reference()
                if unit is not None and (
                    self._bytes_before(device, newest) <= keep_bytes or stays(number)
                ):
                    break
                queue.popleft()
                self._forget(device, number)
                if unit is not None:
                    unit.pending = None
                    yield unit

    def _bytes_before(self, device: torch.device, newest: int) -> int:
        total = self.bytes(device)
        for number, _ in reversed(self._queues[device]):
            if number < newest:
                break
            total -= self._bytes_of.get(number, 0)
        return total

    def _settle(self) -> None:
        while self._gone:
            self._forget(*self._gone.popleft())

    def _forget(self, device: torch.device, number: int) -> None:
        self._bytes[device] -= self._bytes_of.pop(number, 0)


def _note_end(
    gone: deque[tuple[torch.device, int]],
    device: torch.device,
    number: int,
    _reference: UnitReference,
) -> None:
    gone.append((device, number))
