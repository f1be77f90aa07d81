"""Where the native engine finds host memory: each way in its turn, and what each refusal means."""

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lowpeak.offload.errors import OffloadHostMemoryError

if TYPE_CHECKING:
    from lowpeak import _native

logger = logging.getLogger("lowpeak.offload")

LONGEST_WAIT = 64
"""Forwards after which a pool that was refused a segment asks again at the latest."""


class HostLadder:
    """The host memory of one device.

    The ways, in this order: what the pinned pool has free; a room that copies are about to leave;
    a further pinned segment; that once more after the free segments of the other pools, and torch's
    cache of pinned memory, were given back; plain memory, where `pageable`; the error.

    To be refused a segment costs as much as to pin one. So the pool does not ask again in the same
    forward for as many bytes or more, and then only after 1, 2, 4 and at most 64 forwards.
    """

    def __init__(
        self,
        engine: "_native.CopyEngine",
        *,
        pageable: bool,
        give_back: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._pageable = pageable
        self._give_back = give_back
        self._lock = threading.RLock()
        self._forwards = 0
        self._refusal = ""
        self._refused_bytes = math.inf
        self._wait = 1
        self._ask_again = 0
        self._gave_back = False
        self._plain_refusal = ""
        self._plain_refused_bytes = math.inf
        self._told = False
        self._reserves_ring = pageable

    def begin_forward(self, idle_forwards: int) -> None:
        """A forward begins: idle segments go back, and what was refused may be asked for again."""
        with self._lock:
            self._forwards += 1
            self._plain_refused_bytes = math.inf
            self._engine.begin_step(idle_forwards)

    def allocate(self, nbytes: int) -> int:
        """The number of a room of `nbytes`; OffloadHostMemoryError where no way leads to one."""
        with self._lock:
            room = self._pinned(nbytes)
            if room is not None and self._reserves_ring:
                # Now, as all pinned memory may be in use when more is refused.
                self._reserves_ring = not self._engine.reserve_ring()
            if room is None and self._pageable:
                room = self._plain(nbytes)
            if room is None:
                raise OffloadHostMemoryError(self._words(nbytes))
            return room

    def _pinned(self, nbytes: int) -> int | None:
        room = self._try(nbytes, may_grow=False)
        if room is not None:
            self._gave_back = False
            return room
        if nbytes >= self._refused_bytes and self._forwards < self._ask_again:
            return None
        room = self._try(nbytes, may_grow=True)
        if room is None and not self._gave_back:
            # Once, until memory was to be had again: it may take milliseconds, and waits.
            self._gave_back = True
            self._give_back()
            room = self._try(nbytes, may_grow=True)
        if room is None:
            self._refused_bytes = min(nbytes, self._refused_bytes)
            self._ask_again = self._forwards + self._wait
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        elif nbytes >= self._refused_bytes:
            self._refused_bytes, self._wait = math.inf, 1
        return room

    def _try(self, nbytes: int, *, may_grow: bool) -> int | None:
        from lowpeak._native import HostMemoryError

        try:
            return self._engine.allocate(nbytes, may_grow)
        except HostMemoryError as error:
            if may_grow:
                self._refusal = str(error)
            return None

    def _plain(self, nbytes: int) -> int | None:
        from lowpeak._native import HostMemoryError

        if nbytes >= self._plain_refused_bytes:
            return None
        try:
            room = self._engine.allocate_plain(nbytes)
        except HostMemoryError as error:
            self._plain_refusal = str(error)
            self._plain_refused_bytes = nbytes
            return None
        if not self._told:
            self._told = True
            logger.warning(
                "saved tensors go to plain memory, as fast as one thread of the host copies: %s",
                self._refusal,
            )
        return room

    def _words(self, nbytes: int) -> str:
        plain = f" Plain memory: {self._plain_refusal}." if self._plain_refusal else ""
        return (
            f"no host memory for {nbytes} bytes. Pinned: {self._refusal}.{plain} Remedies: raise "
            "limit_bytes, or leave it out; give the job more host memory or fewer local ranks "
            "(LOCAL_WORLD_SIZE); offload fewer bytes (min_bytes, policy), or shorten the sequence"
        )
