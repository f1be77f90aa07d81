"""One range of one storage that moves as a whole, from its first save to its last handle's end."""

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lowpeak.offload.engine import Copy, CopyEngine, HostRoom
from lowpeak.offload.storage import (
    ALIGNMENT,
    Layout,
    StorageReference,
    bytes_between,
    layout_of,
    view_as,
)

if TYPE_CHECKING:
    from lowpeak.offload.pending import Pending

logger = logging.getLogger("lowpeak.offload")

UnitReference = weakref.ReferenceType["Unit"]


class StorageRecord:
    """The units of one storage that live; each of them holds the record, nobody else does."""

    __slots__ = ("__weakref__", "_units")

    def __init__(self) -> None:
        self._units: list[UnitReference] = []

    def add(self, unit: "Unit") -> None:
        """A unit more."""
        self._units = [reference for reference in self._units if reference() is not None]
        self._units.append(weakref.ref(unit))

    def serving(self, layout: Layout, version: int, storage_bytes: int) -> "Unit | None":
        """A unit that has, or can still take in, a view of the storage at this version."""
        for reference in self._units:
            unit = reference()
            if unit is not None and unit.version == version and unit.join(layout, storage_bytes):
                return unit
        return None


class Unit:
    """A range of bytes of a storage at one version: on its device, on the way, or on the host.

    The handles in the graph own it and nothing else does, so that it and all it holds end with the
    graph. `source` keeps the device memory while the copy out is not ordered before what may
    reuse the memory; `arriving` is memory that a copy in was issued for and nobody took yet.
    """

    __slots__ = (
        "__weakref__",
        "arriving",
        "cloned",
        "copied_out",
        "device",
        "engine",
        "failure",
        "gathered",
        "identity",
        "index",
        "layouts",
        "marks",
        "nbytes",
        "on_release",
        "origin",
        "orphans",
        "pending",
        "place",
        "present",
        "record",
        "refused",
        "reported",
        "room",
        "source",
        "start",
        "stop",
        "version",
    )

    def __init__(
        self,
        engine: CopyEngine,
        tensor: torch.Tensor,
        layout: Layout,
        index: int,
        record: StorageRecord,
        *,
        version: int,
        snapshot: bool,
        on_release: Callable[[int], None],
        orphans: "deque[Remains]",
    ) -> None:
        storage = tensor.untyped_storage()
        self.engine = engine
        self.device = tensor.device
        self.identity = StorageReference(storage)
        self.version = version
        self.index = index
        # Its number in the forward, and where its bytes count until its copy out is issued.
        self.place = 0
        self.pending: Pending | None = None
        self.record = record
        record.add(self)
        self.layouts = {layout}
        # Where the streams were that saved it.
        self.marks = [engine.mark(tensor.device)]
        self.start, self.stop = aligned(layout, storage.nbytes())
        self.nbytes = self.stop - self.start
        self.gathered: Layout | None = None
        self.source: torch.UntypedStorage | None = storage
        # Byte of the saved storage at which `source` begins.
        self.origin = 0
        self.cloned = False
        self.room: HostRoom | None = None
        self.copied_out: Copy | None = None
        self.arriving: tuple[torch.Tensor, Copy] | None = None
        self.present: tuple[StorageReference, Copy] | None = None
        self.failure: str | None = None
        # It was to leave, and there was no memory for it.
        self.refused = False
        self.reported = False
        self.on_release = on_release
        # Where to leave what cannot be given back while a graph is captured.
        self.orphans = orphans
        if snapshot:
            self._clone()

    def _clone(self) -> None:
        """Hold a copy made on the computation's stream: later changes do not reach it."""
        assert self.source is not None
        self.source = bytes_between(self.source, self.start, self.stop).clone().untyped_storage()
        self.origin = self.start
        self.cloned = True

    def join(self, layout: Layout, storage_bytes: int) -> bool:
        """Whether a further view of the same storage and version is served, perhaps by growing.

        Only what was not copied yet grows, and only to where half of the range is asked for.
        """
        if self.failure is not None:
            return False
        if self.gathered is not None:
            return layout in self.layouts
        start, stop = aligned(layout, storage_bytes)
        if self.start <= start and stop <= self.stop:
            self.layouts.add(layout)
            return True
        if self.copied_out is not None or self.source is None or self.cloned:
            return False
        start, stop = min(start, self.start), max(stop, self.stop)
        asked = sum(known.unique_bytes for known in self.layouts | {layout})
        if 2 * asked < stop - start:
            return False
        self.layouts.add(layout)
        self.start, self.stop = start, stop
        self.nbytes = stop - start
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the source still has all bytes; FSDP frees storages by resizing them to zero."""
        return self.source is not None and self.source.nbytes() >= self.stop - self.origin

    def bytes_to_copy(self) -> torch.Tensor:
        """uint8 of what leaves the device; a view that fills less than half of it is gathered."""
        assert self.source is not None
        (first,) = self.layouts if len(self.layouts) == 1 else (None,)
        if first is not None and 2 * first.unique_bytes < first.span:
            strided = view_as(self.source, first.moved(self.origin))
            compact = strided.as_strided(first.compact_size, first.stride).contiguous()
            self.gathered = layout_of(compact)
            self.source, self.origin, self.cloned = compact.untyped_storage(), 0, True
            self.nbytes = self.source.nbytes()
            return bytes_between(self.source, 0, self.nbytes)
        start = self.start - self.origin
        return bytes_between(self.source, start, start + self.nbytes)

    def view(self, storage: torch.UntypedStorage, layout: Layout, base: int) -> torch.Tensor:
        """The saved view over a storage that begins at byte `base` of the saved one.

        Over a gathered storage the elements are spread out again: same strides, new memory.
        """
        if self.gathered is None:
            return view_as(storage, layout.moved(base))
        spread = self.engine.empty(self.device, layout.span).untyped_storage()
        strided = view_as(spread, layout.moved(layout.start))
        strided.as_strided(layout.compact_size, layout.stride).copy_(
            view_as(storage, self.gathered)
        )
        return strided

    def view_of_clone(self, layout: Layout) -> torch.Tensor:
        """The saved view over memory of its own: nobody else may write into the clone."""
        assert self.source is not None
        if self.gathered is not None:
            return self.view(self.source, layout, 0)
        memory = bytes_between(self.source, 0, self.source.nbytes()).clone()
        return self.view(memory.untyped_storage(), layout, self.origin)

    def brought_back(self) -> tuple[torch.UntypedStorage, Copy] | None:
        """Device memory that a copy back filled for somebody who still holds it."""
        if self.present is None:
            return None
        reference, copy = self.present
        storage = reference.get()
        return None if storage is None else (storage, copy)

    @property
    def is_away(self) -> bool:
        """Whether it is on the host only: neither on its device nor on the way there."""
        if self.room is None or self.failure is not None:
            return False
        return self.source is None and self.arriving is None and self.identity.get() is None

    @property
    def is_referenced(self) -> bool:
        """Whether the saved memory is alive though it was copied and let go; once reported, no."""
        let_go = self.copied_out is not None and self.source is None
        return let_go and not self.cloned and not self.reported and self.identity.get() is not None

    def let_source_go(self) -> bool:
        """Drop the device memory; True if somebody else still holds it."""
        self.source = None
        return self.is_referenced

    def discard_arriving(self) -> None:
        """Give up memory that was fetched ahead, ordered after the copy that writes it."""
        if self.arriving is not None and not self.engine.capturing(self.device):
            target, copy = self.arriving
            self.arriving = None
            self.engine.wait(copy, target)

    def __del__(self) -> None:
        # The graph is gone. Whatever a copy still reads or writes goes back to the allocator only
        # behind that copy; the engine keeps the host room until its copies have ended.
        if self.room is None or sys.is_finalizing():
            return
        # The collector also runs under dispatch modes, such as a selective checkpoint's.
        with torch._C._DisableTorchDispatch():
            self._leave_remains(self.room)

    def _leave_remains(self, room: HostRoom) -> None:
        remains = Remains(self.engine, room, self.nbytes, self.on_release)
        if self.source is not None and self.copied_out is not None:
            memory = bytes_between(self.source, 0, self.source.nbytes())
            remains.held.append((self.copied_out, memory))
        if self.arriving is not None:
            target, copy = self.arriving
            remains.held.append((copy, target))
        if self.engine.capturing(self.device):
            self.orphans.append(remains)
        else:
            remains.clear()


# Memory under copies that nothing could be ordered behind.
_never_given_back: list[torch.Tensor] = []


class Remains:
    """What a dropped unit leaves: device memory under copies, and host memory."""

    __slots__ = ("_engine", "_nbytes", "_on_release", "_room", "held")

    def __init__(
        self, engine: CopyEngine, room: HostRoom, nbytes: int, on_release: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._room = room
        self._nbytes = nbytes
        self._on_release = on_release
        self.held: list[tuple[Copy, torch.Tensor]] = []

    def clear(self) -> None:
        """Give all of it back, the device memory behind its copies."""
        while self.held:
            copy, memory = self.held.pop()
            try:
                self._engine.wait(copy, memory)
            except Exception as error:
                # Nobody can catch what a finaliser raises.
                _never_given_back.append(memory)
                logger.error("a copy of a graph that is gone, its memory is kept: %s", str(error))
        self._engine.release(self._room)
        self._on_release(self._nbytes)


def aligned(layout: Layout, storage_bytes: int) -> tuple[int, int]:
    """The bytes to copy for a layout: from an aligned offset, within the storage."""
    start = layout.start - layout.start % ALIGNMENT
    return start, min(layout.stop, storage_bytes)
