"""How many bytes of device memory the copies may hold in each direction."""

import weakref
from collections import deque
from functools import partial

import torch

from lowpeak.offload.engine import CopyEngine
from lowpeak.offload.storage import bytes_between
from lowpeak.offload.telemetry import Telemetry
from lowpeak.offload.unit import Unit, UnitReference

SMALLEST_WINDOW = 64 << 20
REFERENCES_WATCHED = 4096


class Window:
    """The copies out of one device that have not ended, oldest first, and their bytes.

    The limit holds for each direction: `window_bytes`, or at least 64 MiB and, of the largest unit
    copied in this and the last forward, two on the way out and one on the way back. A unit is let
    go when its copy ended; over the limit the current stream waits for the oldest copy first, so
    that the peak depends on the order of calls and not on the copies' speed.
    """

    def __init__(
        self,
        engine: CopyEngine,
        device: torch.device,
        window_bytes: int | None,
        telemetry: Telemetry,
    ) -> None:
        self._engine = engine
        self._device = device
        self._window_bytes = window_bytes
        self._telemetry = telemetry
        self._largest_ever = 0
        self._largest_now = 0
        self._largest_before = 0
        self._leaving: deque[UnitReference] = deque()
        self._arriving: dict[int, tuple[UnitReference, int]] = {}
        self._arriving_bytes = 0
        self._ended: deque[int] = deque()
        # Let go while somebody else held the memory, which may end with the user's next statement.
        self._referenced: deque[UnitReference] = deque(maxlen=REFERENCES_WATCHED)

    @property
    def limit(self) -> int:
        """Bytes that may be in flight in one direction."""
        if not self._engine.overlaps:
            return 0
        if self._window_bytes is not None:
            return self._window_bytes
        return max(SMALLEST_WINDOW, 2 * self._largest)

    @property
    def limit_back(self) -> int:
        """Bytes that may be fetched ahead: one unit arrives while a layer computes with another."""
        if not self._engine.overlaps or self._window_bytes is not None:
            return self.limit
        return max(SMALLEST_WINDOW, self._largest)

    @property
    def _largest(self) -> int:
        return max(self._largest_now, self._largest_before)

    @property
    def margin(self) -> int:
        """Bytes at the end of a forward that may stay for backward: half a window."""
        if self._window_bytes is not None:
            return self._window_bytes // 2
        return max(SMALLEST_WINDOW // 2, self._largest_ever)

    @property
    def busy(self) -> bool:
        """Whether copies out are not known to have ended."""
        return bool(self._leaving)

    def begin_forward(self) -> None:
        """Count no more what was copied two forwards ago, and what was fetched and given up."""
        self._largest_before, self._largest_now = self._largest_now, 0
        for index, (reference, _) in list(self._arriving.items()):
            unit = reference()
            if unit is None or unit.arriving is None:
                self._no_longer_arrives(index)

    def leave(self, unit: Unit) -> None:
        """A copy out was issued: count it, and let go what may go."""
        self._largest_now = max(self._largest_now, unit.nbytes)
        self._largest_ever = max(self._largest_ever, unit.nbytes)
        self._leaving.append(weakref.ref(unit))
        self.retire()

    def retire(self) -> None:
        """Let sources go, oldest first, waiting on the device only while over the limit.

        Nothing during a capture, in which asking for an event of another stream is an error.
        """
        if not self._leaving or self._engine.capturing(self._device):
            return
        in_flight = self.leaving_bytes()
        while self._leaving:
            unit = self._leaving[0]()
            if unit is not None and unit.source is not None:
                assert unit.copied_out is not None
                if not self._engine.done(unit.copied_out):
                    if in_flight <= self.limit:
                        break
                    memory = bytes_between(unit.source, 0, unit.source.nbytes())
                    self._engine.wait(unit.copied_out, memory)
                    del memory
                in_flight -= unit.nbytes
                self._telemetry.trace.end("out", unit.index)
                if unit.let_source_go():
                    self._referenced.append(self._leaving[0])
            self._leaving.popleft()
        self._telemetry.note_in_flight(in_flight)

    def leaving_bytes(self) -> int:
        """Bytes whose copy out has not been seen to end."""
        alive = (reference() for reference in self._leaving)
        return sum(unit.nbytes for unit in alive if unit is not None and unit.source is not None)

    def referenced(self) -> list[Unit]:
        """Units that were copied, and whose memory somebody holds now, not yet reported."""
        units = [reference() for reference in self._referenced]
        return [unit for unit in units if unit is not None and unit.is_referenced]

    def arriving_bytes(self) -> int:
        """Bytes fetched ahead that nobody took yet."""
        while self._ended:
            self._no_longer_arrives(self._ended.popleft())
        return self._arriving_bytes

    def arrive(self, unit: Unit) -> None:
        """A unit was fetched ahead."""
        # The end of a unit may interrupt anything, so it is only queued.
        ended = partial(_note_end, self._ended, unit.index)
        self._arriving[unit.index] = weakref.ref(unit, ended), unit.nbytes
        self._arriving_bytes += unit.nbytes
        self._telemetry.note_fetched_ahead(self.arriving_bytes())

    def arrived(self, unit: Unit) -> None:
        """A unit that may have been fetched ahead was taken."""
        self._no_longer_arrives(unit.index)

    def _no_longer_arrives(self, index: int) -> None:
        _, nbytes = self._arriving.pop(index, (None, 0))
        self._arriving_bytes -= nbytes


def _note_end(ended: deque[int], index: int, _reference: UnitReference) -> None:
    ended.append(index)
