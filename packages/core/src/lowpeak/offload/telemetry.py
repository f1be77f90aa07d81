"""What was saved, moved, kept and why: counters, and what they add up to."""

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final

from lowpeak.offload.trace import Trace

REASONS: Final = MappingProxyType(
    {
        "small": "smaller than min_bytes",
        "leaf": "parameters, buffers and other leaves, held outside the graph anyway",
        "other_device": "on a device that nothing is moved from",
        "layout": "sparse, nested or another layout that is not strided",
        "quantized": "quantized",
        "conjugate": "lazily conjugated or negated",
        "empty": "without elements",
        "subclass": "of a tensor subclass that cannot be taken apart",
        "policy": "not chosen by the policy",
        "in_backward": "saved while a backward runs, which asks for them at once",
        "asked_for_first": "saved by what backward begins with, such as a head",
        "capture": "saved while a device graph is captured",
        "host_memory": "the host had no memory for them",
        "device_memory": "the device had no memory to gather them",
        "resized": "their storage was resized since",
        "selective": "saved by selective checkpointing in a way that cannot be packed",
    }
)
"""Why a saved tensor stayed on its device; the keys of `OffloadStats.kept`."""


@dataclass(frozen=True)
class Amount:
    """A number of tensors and their bytes."""

    count: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class OffloadStats:
    """What one `OffloadActivations` did since it was made, or since `reset_stats()`."""

    forwards: int = 0
    """Times the context was entered with hooks installed."""
    saved: Amount = Amount()
    """Tensors that autograd saved under the hooks."""
    checkpoint_inputs: Amount = Amount()
    """Those of them that were inputs of checkpoints."""
    selective: Amount = Amount()
    """Tensors that selective checkpoints kept and that were packed."""
    offloaded: Amount = Amount()
    """Ranges of storages that were chosen to leave their device."""
    deduplicated: Amount = Amount()
    """Saved tensors that another saved tensor's range serves."""
    subclasses: Amount = Amount()
    """Wrapper subclasses that were taken apart (their leaves are counted as saved tensors)."""
    copied_out: Amount = Amount()
    """Copies from a device to the host."""
    copied_in: Amount = Amount()
    """Copies from the host to a device."""
    forwarded: Amount = Amount()
    """Saved tensors that were still on their device when backward asked, and were not copied."""
    forwarded_after_copy: Amount = Amount()
    """Those of them whose copy out was wasted."""
    prefetch_hits: Amount = Amount()
    """Saved tensors that were on their way, or back, when backward asked."""
    prefetch_misses: Amount = Amount()
    """Saved tensors whose copy back began when backward asked."""
    prefetch_refused: Amount = Amount()
    """Copies back that had to wait because the device had no memory to fetch ahead."""
    still_referenced: Amount = Amount()
    """Copied out for nothing: somebody else holds the memory, now or when backward asked."""
    snapshots: Amount = Amount()
    """Saved tensors changed in place since, whose value at saving was given back."""
    failed: Amount = Amount()
    """Copies that failed; using them raises."""
    kept: Mapping[str, Amount] = field(default_factory=dict)
    """Saved tensors that stayed on their device, by reason (`REASONS`)."""
    in_flight_peak_bytes: int = 0
    """The most device bytes held by copies out at one time."""
    fetched_ahead_peak_bytes: int = 0
    """The most device bytes held by copies back that nobody had asked for yet."""
    host_bytes: int = 0
    """Host bytes in use now."""
    host_peak_bytes: int = 0
    """The most host bytes in use at one time."""


class Telemetry:
    """Counts, for one context; every method may be called from any thread."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._lock = threading.RLock()
        # A finaliser may interrupt anything, so what it reports is only queued.
        self._released: deque[int] = deque()
        self._host_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Begin again at zero, but for the host bytes that are in use."""
        with self._lock:
            self._settle()
            self._amounts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
            self._kept: dict[str, list[int]] = defaultdict(lambda: [0, 0])
            self._forwards = 0
            self._in_flight_peak = 0
            self._fetched_ahead_peak = 0
            self._host_peak = self._host_bytes
            self.trace.clear()

    def stats(self, referenced: Iterable[int]) -> OffloadStats:
        """The counters now, with the bytes of what is copied and referenced at this moment."""
        with self._lock:
            self._settle()
            seen = list(self._amounts["still_referenced"])
            for nbytes in referenced:
                _add(seen, nbytes)
            amounts = {
                entry.name: Amount(*self._amounts[entry.name])
                for entry in fields(OffloadStats)
                if entry.type is Amount
            }
            amounts["still_referenced"] = Amount(*seen)
            return OffloadStats(
                forwards=self._forwards,
                kept=MappingProxyType({name: Amount(*pair) for name, pair in self._kept.items()}),
                in_flight_peak_bytes=self._in_flight_peak,
                fetched_ahead_peak_bytes=self._fetched_ahead_peak,
                host_bytes=self._host_bytes,
                host_peak_bytes=self._host_peak,
                **amounts,
            )

    @property
    def host_bytes(self) -> int:
        """Host bytes in use."""
        with self._lock:
            self._settle()
            return self._host_bytes

    def count(self, counter: str, nbytes: int) -> None:
        """One more of a counter that is an `Amount`."""
        with self._lock:
            _add(self._amounts[counter], nbytes)

    def keep(self, reason: str, nbytes: int) -> None:
        """A saved tensor stays on its device."""
        assert reason in REASONS, reason
        with self._lock:
            _add(self._kept[reason], nbytes)

    def note_forward(self) -> None:
        """The context was entered."""
        with self._lock:
            self._forwards += 1

    def note_in_flight(self, nbytes: int) -> None:
        """Device bytes that copies out hold."""
        with self._lock:
            self._in_flight_peak = max(self._in_flight_peak, nbytes)

    def note_fetched_ahead(self, nbytes: int) -> None:
        """Device bytes that copies back hold ahead of their use."""
        with self._lock:
            self._fetched_ahead_peak = max(self._fetched_ahead_peak, nbytes)

    def note_room(self, nbytes: int) -> None:
        """Host bytes were taken."""
        with self._lock:
            self._settle()
            self._host_bytes += nbytes
            self._host_peak = max(self._host_peak, self._host_bytes)

    def note_room_released(self, nbytes: int) -> None:
        """Host bytes were given back; called by finalisers."""
        self._released.append(nbytes)

    def _settle(self) -> None:
        while self._released:
            self._host_bytes -= self._released.popleft()


def _add(pair: list[int], nbytes: int) -> None:
    pair[0] += 1
    pair[1] += nbytes


def explain(stats: OffloadStats, choice: str, engine: str) -> str:
    """What the counters say, for people."""
    sentences = [
        f"{_capital(choice)} (engine {engine}).",
        f"In {stats.forwards} forwards {_amount(stats.saved)} were saved; "
        f"{_amount(stats.checkpoint_inputs)} were inputs of checkpoints, "
        f"{_amount(stats.selective)} kept by selective ones.",
        f"{_amount(stats.offloaded)} were chosen to leave, {_amount(stats.copied_out)} were "
        f"copied to the host and {_amount(stats.copied_in)} back; {_amount(stats.deduplicated)} "
        f"shared the bytes of others, {_amount(stats.forwarded)} were still there when backward "
        "asked.",
        f"At most {_size(stats.in_flight_peak_bytes)} were in flight, "
        f"{_size(stats.fetched_ahead_peak_bytes)} fetched ahead, {_size(stats.host_peak_bytes)} "
        "on the host.",
    ]
    if stats.still_referenced.count:
        sentences.append(
            f"{_amount(stats.still_referenced)} were copied but still referenced elsewhere: their "
            "copies freed nothing."
        )
    if stats.forwarded_after_copy.count:
        sentences.append(
            f"{_amount(stats.forwarded_after_copy)} were copied for nothing, as they were still "
            "there when backward asked."
        )
    if stats.failed.count:
        sentences.append(f"{_amount(stats.failed)} failed to be copied.")
    stayed = [
        f"{_amount(amount)} {REASONS[name]}"
        for name, amount in sorted(stats.kept.items(), key=lambda item: -item[1].bytes)
    ]
    if stayed:
        sentences.append(f"Stayed: {'; '.join(stayed)}.")
    return " ".join(sentences)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _amount(amount: Amount) -> str:
    tensors = "tensor" if amount.count == 1 else "tensors"
    return f"{amount.count} {tensors} ({_size(amount.bytes)})"


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} bytes"
