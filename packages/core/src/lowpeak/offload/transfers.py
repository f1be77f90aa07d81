"""Saving and bringing back: what all handles of one context share.

Nothing here knows a saved tensor by number or address: a unit lives as long as the handles that
autograd's graph holds, and the index of storages below holds its records weakly.
"""

import logging
import threading
import weakref
from collections import deque

import torch

from lowpeak.offload.engine import CopyEngine
from lowpeak.offload.errors import OffloadError, OffloadHostMemoryError
from lowpeak.offload.margin import Margin
from lowpeak.offload.policy import Memory, Policy
from lowpeak.offload.prefetch import Generation
from lowpeak.offload.storage import (
    Layout,
    StorageReference,
    bytes_between,
    layout_of,
    view_as,
)
from lowpeak.offload.telemetry import OffloadStats, Telemetry
from lowpeak.offload.trace import nvtx_range
from lowpeak.offload.unit import Remains, StorageRecord, Unit
from lowpeak.offload.window import Window

logger = logging.getLogger("lowpeak.offload")


class Transfers:
    """Moves units out, bounded by a window, and back, ahead of backward.

    Copies start lazily: the copy of a unit is issued when `keep_last` newer ones were saved, and
    `keep_bytes` bytes between them and it, so the last ones of a forward stay; the policy may hold
    all of them back. Backward fetches ahead into what it has freed of those bytes.
    """

    def __init__(
        self,
        engine: CopyEngine,
        telemetry: Telemetry,
        policy: Policy,
        *,
        window_bytes: int | None,
        keep_last: int,
        keep_bytes: int,
        snapshot: bool,
    ) -> None:
        self.engine = engine
        self.telemetry = telemetry
        self.snapshot = snapshot
        self.lock = threading.RLock()
        self._keep_last = keep_last
        self._keep_bytes = keep_bytes
        self._policy = policy
        self._window_bytes = window_bytes
        self._windows: dict[torch.device, Window] = {}
        # By the address of the storage, which the weak reference in every unit of the record
        # reserves, so that an entry that still exists is of this very storage.
        self._records: weakref.WeakValueDictionary[int, StorageRecord] = (
            weakref.WeakValueDictionary()
        )
        self._units_made = 0
        self._host_memory_told = False
        self._orphans: deque[Remains] = deque()
        self._margin = Margin()
        self._last: Generation | None = None
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()

    def begin_forward(self) -> Generation:
        """A generation; what older ones fetched ahead and nobody took is given up."""
        with self.lock:
            self._clear_orphans()
            for older in list(self._generations):
                older.close()
            for window in self._windows.values():
                window.begin_forward()
            if self._last is not None and self._last.unpacked:
                most = max((window.margin for window in self._windows.values()), default=0)
                self._margin.learn(self._last, most)
            self.window(self.engine.current_device())
            self._policy.forward_begins(self._memory)
            self.telemetry.note_forward()
            self.engine.begin_forward()
            generation = self._last = Generation()
            self._generations.add(generation)
            return generation

    def stats(self) -> OffloadStats:
        """The counters now."""
        with self.lock:
            referenced = [unit for window in self._windows.values() for unit in window.referenced()]
            return self.telemetry.stats([unit.nbytes for unit in referenced])

    def synchronize(self) -> None:
        """Block until all copies have ended, and let go what they held."""
        with self.lock:
            self._clear_orphans()
        self.engine.synchronize()
        with self.lock:
            for window in self._windows.values():
                window.retire()

    def _clear_orphans(self) -> None:
        """Give back what was dropped during a capture."""
        if not any(self.engine.capturing(device) for device in self._windows):
            while self._orphans:
                self._orphans.popleft().clear()

    def poll(self, device: torch.device) -> None:
        """Let go what may go; called for every saved tensor, as few of a forward may be moved."""
        window = self._windows.get(device)
        if window is not None and window.busy:
            with self.lock:
                window.retire()

    def _memory(self) -> dict[torch.device, Memory]:
        known = {}
        for device in self._windows:
            peak = self.engine.peak_bytes(device)
            if peak is not None:
                known[device] = Memory(peak, self.engine.allocated_bytes(device))
        return known

    def window(self, device: torch.device) -> Window:
        """The window of a device."""
        window = self._windows.get(device)
        if window is None:
            window = Window(self.engine, device, self._window_bytes, self.telemetry)
            self._windows[device] = window
        return window

    def save(
        self, tensor: torch.Tensor, version: int, generation: Generation
    ) -> tuple[Unit, Layout, int]:
        """The unit that holds a tensor's bytes, the tensor's layout, its place in the forward."""
        layout = layout_of(tensor)
        storage = tensor.untyped_storage()
        with self.lock:
            record = self._records.get(storage._cdata)
            unit = None
            if record is not None:
                unit = record.serving(layout, version, storage.nbytes())
            if unit is not None:
                if unit.pending is not None:
                    unit.pending.measure(unit)
                if unit.copied_out is None:
                    unit.marks.append(self.engine.mark(tensor.device))
                self.telemetry.count("deduplicated", tensor.nbytes)
                return unit, layout, generation.append(unit, new=False)
            if record is None:
                record = StorageRecord()
            unit = self._new_unit(tensor, layout, version, record)
            self._records[storage._cdata] = record
            position = generation.append(unit, new=True)
            window = self.window(tensor.device)
            self._start_copies(generation, window)
            window.retire()
            self._policy.observe(self._memory, self.telemetry.host_bytes)
            return unit, layout, position

    def _new_unit(
        self, tensor: torch.Tensor, layout: Layout, version: int, record: StorageRecord
    ) -> Unit:
        unit = Unit(
            self.engine,
            tensor,
            layout,
            self._units_made,
            record,
            version=version,
            snapshot=self.snapshot,
            on_release=self.telemetry.note_room_released,
            orphans=self._orphans,
        )
        self._units_made += 1
        self.telemetry.count("offloaded", unit.nbytes)
        return unit

    def _start_copies(self, generation: Generation, window: Window) -> None:
        pending, newest = generation.pending, generation.made - self._keep_last
        if newest <= 0:
            return
        # What stays in any case is no more of a reason to begin than what is in flight.
        if not self._policy.opens(pending.all_bytes(), window.limit + self._keep_bytes):
            return
        for unit in pending.leaving(
            newest, self._keep_bytes, lambda place: self._margin.keeps(place, generation.made)
        ):
            self._copy_out(unit)

    def _copy_out(self, unit: Unit) -> None:
        """Issue the copy of a unit to the host; where it has no memory the unit stays."""
        if not unit.is_whole:
            # Somebody manages this memory by hand; backward finds it as it will be then.
            self.telemetry.keep("resized", unit.nbytes)
            return
        for mark in unit.marks:
            self.engine.follow(mark)
        unit.marks.clear()
        try:
            source = unit.bytes_to_copy()
        except torch.OutOfMemoryError:
            self._refuse(unit, "device_memory")
            return
        try:
            room = self.engine.allocate(unit.device, unit.nbytes)
        except OffloadHostMemoryError as error:
            self._tell_host_memory(error)
            self._refuse(unit, "host_memory")
            return
        try:
            with nvtx_range(unit.device, f"offload out {unit.index}"):
                unit.copied_out = self.engine.copy_out(source, room)
        except Exception as error:
            # The copy may have begun: nothing of this unit is used again.
            unit.failure = self._name(unit, f"could not be copied to the host: {error}")
            unit.source = None
            self.telemetry.count("failed", unit.nbytes)
            self.engine.release(room)
            return
        unit.room = room
        self.telemetry.note_room(unit.nbytes)
        self.telemetry.count("copied_out", unit.nbytes)
        self.telemetry.trace.begin("out", unit.index, unit.nbytes)
        self.window(unit.device).leave(unit)

    def _refuse(self, unit: Unit, reason: str) -> None:
        """The unit stays, this time."""
        unit.refused = True
        self.telemetry.keep(reason, unit.nbytes)

    def restore(
        self, unit: Unit, layout: Layout, place: int, generation: Generation, *, changed: bool
    ) -> torch.Tensor:
        """The saved bytes of one view, on their device and in order with the current stream.

        `changed`: the saved tensor was changed since, so that only a copy made before serves.
        """
        nbytes = layout.unique_bytes
        with self.lock:
            generation.unpacked = True
            self._policy.observe(self._memory, self.telemetry.host_bytes)
            if unit.failure is not None:
                raise OffloadError(unit.failure)
            if unit.is_referenced:
                unit.reported = True
                self.telemetry.count("still_referenced", unit.nbytes)
            if unit.source is not None and not unit.refused:
                generation.found_on_device[unit.place] = unit.nbytes
            data = self._on_device(unit, layout, changed=changed)
            capturing = self.engine.capturing(unit.device)
            if data is None:
                if capturing:
                    raise OffloadError(
                        self._name(unit, "is on the host and asked for in the capture of a graph")
                        + ": capture forward and backward together, or without offload"
                    )
                data = self._bring_back(unit, layout, nbytes, changed=changed)
            else:
                self.telemetry.count("forwarded", nbytes)
                if unit.copied_out is not None:
                    self.telemetry.count("forwarded_after_copy", nbytes)
            if not capturing:
                self._fetch_ahead(unit, place, generation)
                self.window(unit.device).retire()
            return data

    def _on_device(self, unit: Unit, layout: Layout, *, changed: bool) -> torch.Tensor | None:
        """The view over memory that never left, or None."""
        if unit.source is not None and unit.cloned:
            return unit.view_of_clone(layout)
        if unit.source is not None and not changed:
            if not unit.is_whole:
                raise OffloadError(self._name(unit, "lost its memory: its storage was resized"))
            return unit.view(unit.source, layout, unit.origin)
        if changed:
            return None
        storage = unit.identity.get()
        return None if storage is None else view_as(storage, layout)

    def _bring_back(
        self, unit: Unit, layout: Layout, nbytes: int, *, changed: bool
    ) -> torch.Tensor:
        """The view over memory that a copy back fills; the current stream waits for the copy."""
        base = 0 if unit.gathered is not None else unit.start
        if unit.arriving is None:
            shared = None if changed else unit.brought_back()
            if shared is not None:
                storage, copy = shared
                self.engine.wait(copy, bytes_between(storage, 0, storage.nbytes()))
                self.telemetry.count("prefetch_hits", nbytes)
                return unit.view(storage, layout, base)
            self.telemetry.count("prefetch_misses", nbytes)
            self._copy_in(unit)
        else:
            self.telemetry.count("prefetch_hits", nbytes)
        assert unit.arriving is not None
        target, copy = unit.arriving
        self.engine.wait(copy, target)
        # Handed out once: from here on the graph's user owns the memory, the unit knows it weakly.
        unit.present = StorageReference(target.untyped_storage()), copy
        unit.arriving = None
        self.window(unit.device).arrived(unit)
        self.telemetry.trace.end("in", unit.index)
        return unit.view(target.untyped_storage(), layout, base)

    def _copy_in(self, unit: Unit) -> None:
        """Issue the copy of a unit back to its device."""
        if unit.room is None or unit.copied_out is None:
            raise OffloadError(self._name(unit, "was neither copied to the host nor kept"))
        target = self.engine.empty(unit.device, unit.nbytes)
        try:
            with nvtx_range(unit.device, f"offload in {unit.index}"):
                copy = self.engine.copy_in(unit.room, target, unit.copied_out)
        except Exception as error:
            unit.failure = self._name(unit, f"could not be copied back: {error}")
            self.telemetry.count("failed", unit.nbytes)
            raise OffloadError(unit.failure) from error
        unit.arriving = target, copy
        self.telemetry.count("copied_in", unit.nbytes)
        self.telemetry.trace.begin("in", unit.index, unit.nbytes)

    def _fetch_ahead(self, unit: Unit, place: int, generation: Generation) -> None:
        """Issue copies back for what the reversed order asks for next, while the window allows."""
        window = self.window(unit.device)
        free = window.limit_back - window.arriving_bytes()
        if self.engine.overlaps:
            free += max(0, self._keep_bytes - generation.pending.bytes(unit.device))
        for coming in generation.away_before(unit.device, place):
            free -= coming.nbytes
            if free < 0 or not self._fetch(coming, window):
                return

    def _fetch(self, unit: Unit, window: Window) -> bool:
        """Have a unit's memory held until it is asked for; False to fetch no more."""
        shared = None if self.snapshot else unit.brought_back()
        if shared is not None:
            # Another saved tensor of the unit was asked for, and is in use: no second copy.
            storage, copy = shared
            unit.arriving = bytes_between(storage, 0, storage.nbytes()), copy
            window.arrive(unit)
            return True
        try:
            self._copy_in(unit)
        except torch.OutOfMemoryError:
            self.telemetry.count("prefetch_refused", unit.nbytes)
            return False
        except OffloadError:
            # Told where the tensor itself is asked for.
            return False
        window.arrive(unit)
        return True

    def _tell_host_memory(self, error: OffloadHostMemoryError) -> None:
        if not self._host_memory_told:
            self._host_memory_told = True
            # The text alone: a log that kept the error would keep its frames, and their tensors.
            logger.warning("saved tensors stay on their device: %s", str(error))

    @staticmethod
    def _name(unit: Unit, event: str) -> str:
        return f"saved tensor {unit.index} ({unit.nbytes} bytes on {unit.device}) {event}"
