"""Rows of the offload benchmark: lowpeak's context, its peers, and none, and what each moved."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowpeak.offload import OffloadActivations
from lowpeak.offload.native_engine import NativeSimEngine

BASELINE = "none"
LOWPEAK = ("lowpeak auto", "lowpeak checkpoint_inputs", "lowpeak all")
# On an H200 at 8192 tokens TRL's helper peaked 4.7 GiB above "lowpeak all".
KEEPING = "lowpeak all keep 4 GiB"
KEPT_BYTES = 4 << 30
TRL = "TRL OffloadActivations"
SAVE_ON_CPU = "torch save_on_cpu"
OURS = (*LOWPEAK, KEEPING)
ROWS = (BASELINE, *OURS, TRL, SAVE_ON_CPU)
WITH_NATIVE = " native"
# Only where they are named: the native engine is opt-in.
NATIVE = tuple(name + WITH_NATIVE for name in OURS)


@dataclass(frozen=True)
class Moved:
    """Bytes from the device to the host and back since `reset`; None where nobody counts.

    `ready` is the part of the bytes coming back that were on their way, or there, when backward
    asked; `host` is the most bytes that were away at a time; `explanation` is what the helper says
    of itself.
    """

    out: int | None = None
    back: int | None = None
    ready: float | None = None
    host: int | None = None
    explanation: str | None = None


class Helper(Protocol):
    """A context around forward and backward that is entered once a step."""

    @property
    def context(self) -> AbstractContextManager[Any, Any]:
        """The context."""
        ...

    def reset(self) -> None:
        """Begin to count again."""

    def moved(self) -> Moved:
        """What was moved since."""
        ...


@dataclass(frozen=True)
class Nothing:
    """The step as it is."""

    context: AbstractContextManager[Any, Any] = field(default_factory=nullcontext)

    def reset(self) -> None:
        """Nothing is counted."""

    def moved(self) -> Moved:
        """Nothing."""
        return Moved(0, 0)


@dataclass(frozen=True)
class Ours:
    """lowpeak's context, which counts for itself."""

    context: OffloadActivations

    def reset(self) -> None:
        """Begin its counters again."""
        self.context.reset_stats()

    def moved(self) -> Moved:
        """Its counters."""
        stats = self.context.stats()
        hits, misses = stats.prefetch_hits.bytes, stats.prefetch_misses.bytes
        return Moved(
            out=stats.copied_out.bytes,
            back=stats.copied_in.bytes,
            ready=hits / (hits + misses) if hits + misses else None,
            host=stats.host_peak_bytes,
            explanation=self.context.explain(),
        )


class Counted:
    """A peer's saved-tensor hooks, as it ships, with a count of what they move.

    Args:
        context: has `pack_hook` and `unpack_hook`.
        on_host: the tensor on the host that a packed object stands for, or None where the object
            stands for one on the device; asked after packing and before unpacking.
    """

    def __init__(self, context: Any, on_host: Callable[[Any], Tensor | None]) -> None:
        self.context = context
        self._on_host = on_host
        self.reset()
        pack, unpack = context.pack_hook, context.unpack_hook

        def counting_pack(tensor: Tensor) -> Any:
            packed = pack(tensor)
            self._out += self._bytes(packed)
            return packed

        def counting_unpack(packed: Any) -> Tensor:
            self._back += self._bytes(packed)
            restored: Tensor = unpack(packed)
            return restored

        context.pack_hook, context.unpack_hook = counting_pack, counting_unpack

    def reset(self) -> None:
        """Begin to count again."""
        self._out = self._back = 0

    def moved(self) -> Moved:
        """The counts."""
        return Moved(self._out, self._back)

    def _bytes(self, packed: Any) -> int:
        host = self._on_host(packed)
        return 0 if host is None else host.numel() * host.element_size()


def make_helper(
    name: str, body: nn.Module, device: torch.device, ours: Mapping[str, Any]
) -> Helper:
    """The helper of a row for `body`; `ours` are options of lowpeak's.

    TRL's is made as TRL's trainers make it.
    """
    if name == KEEPING:
        return make_helper(LOWPEAK[-1], body, device, {**ours, "keep_bytes": KEPT_BYTES})
    if name in LOWPEAK:
        policy: Any = name.removeprefix("lowpeak ")
        return Ours(OffloadActivations(policy, **ours))
    if name in NATIVE:
        simulated = ours.get("device_backend") == "sim"
        backend = NativeSimEngine(mode="eager") if simulated else "native"
        return make_helper(
            name.removesuffix(WITH_NATIVE), body, device, {**ours, "device_backend": backend}
        )
    if name == TRL:
        module = importlib.import_module("trl.models.activation_offloading")
        context = module.get_act_offloading_ctx_manager(model=body, warn_if_no_head=False)
        return Counted(context, lambda key: _trl_on_host(context, key))
    if name == SAVE_ON_CPU:
        pinned = device.type != "cpu"
        return Counted(
            torch.autograd.graph.save_on_cpu(pin_memory=pinned), lambda packed: packed[1]
        )
    return Nothing()


def _trl_on_host(context: Any, key: int) -> Tensor | None:
    if key not in context.tracker:
        return None
    tensor: Tensor = context.tracker[key][0]
    # what is still in its stash is handed out again, without a copy back
    in_backward = torch._C._current_graph_task_id() != -1
    if tensor.device.type != "cpu" or (in_backward and key in context.fwd_stash):
        return None
    return tensor


def rows_for(checkpointing: bool, tokens: int, chosen: list[str] | None) -> list[str]:
    """Rows of a setting: `chosen`, or those that tell something of it.

    Without checkpoints there are no inputs of them, and with them no time to gain by keeping more.
    A step of more than 32768 tokens takes seconds and has few rows: "auto" chooses one of the other
    policies.
    """
    if chosen is not None:
        return chosen
    left_out = {KEEPING} if checkpointing else {"lowpeak checkpoint_inputs"}
    if tokens > 32768:
        left_out |= {"lowpeak checkpoint_inputs", "lowpeak all", KEEPING}
    return [name for name in ROWS if name not in left_out]


def as_fields(moved: Moved) -> dict[str, Any]:
    """The fields of a result that `moved` fills."""
    values = dataclasses.asdict(moved)
    return {
        "bytes_out": values["out"],
        "bytes_back": values["back"],
        "ready_in_time": values["ready"],
        "host_bytes": values["host"],
        "explanation": values["explanation"],
    }
