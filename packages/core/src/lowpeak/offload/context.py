"""`OffloadActivations`: the context around a forward."""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

import torch

from lowpeak.offload import checkpoints
from lowpeak.offload.engine import Backend, CopyEngine, NullEngine
from lowpeak.offload.handle import Packed, unpack_saved
from lowpeak.offload.machine import why_not_here
from lowpeak.offload.native_engine import NativeEngine
from lowpeak.offload.packing import Packer, Role
from lowpeak.offload.policy import PolicyName, SavedTensor, make_policy
from lowpeak.offload.prefetch import Generation
from lowpeak.offload.regions import regions
from lowpeak.offload.sim_engine import SimEngine
from lowpeak.offload.telemetry import OffloadStats, Telemetry, explain
from lowpeak.offload.torch_engine import DEVICE_TYPES, TorchEngine
from lowpeak.offload.transfers import Transfers

logger = logging.getLogger("lowpeak.offload")

OnMutation = Literal["raise", "snapshot"]
DEFAULT_MIN_BYTES = 1 << 20


class OffloadActivations:
    """Keep saved activations on the host between forward and backward.

    Used around a forward; backward may run inside or outside of the context, which may be entered
    again and again. Gradients are those of plain autograd, bit for bit.

    `policy`: "checkpoint_inputs" moves what checkpoints recompute from (also tensors in lists,
    dicts and keyword arguments, and what selective checkpoints keep), "all" every saved tensor of
    `min_bytes` bytes or more, a function those for which it returns True; "auto" moves checkpoint
    inputs where checkpointing is on, all where it is not, and nothing while that cannot lower the
    peak (`explain()` tells). Parameters and their views are never moved.

    `use_streams=False` copies as a part of the computation, not beside it. `window_bytes` bounds
    the device bytes in flight, in each direction; None is twice the largest range moved on the way
    out and once on the way back, at least 64 MiB. The `keep_last` last ranges of a forward stay, as
    backward asks for them first, and before these as many as hold at most `keep_bytes` bytes on
    their device, for each forward whose backward is to come. Where the copies are what a step waits
    for, that is a step shorter by 2 * keep_bytes / (bytes copied in a second), at a peak higher by
    up to `keep_bytes`: backward fetches ahead into what it has freed of them.

    `device_backend`: "auto" is "torch" (CUDA, ROCm, XPU) where there is a device and otherwise
    "null", with which the context does nothing, as under WSL2; "native" is the native extension's
    engine on CUDA and ROCm. Integrated GPUs are left alone with any of these names. "sim" lets CPU
    tensors play a device's; an object is used as the engine (`lowpeak.offload.engine.CopyEngine`).

    A tensor changed in place after it was saved raises autograd's own error in backward. With
    `on_mutation="snapshot"` a moved tensor gives its value at saving instead, at the price of a
    device copy of each when it is saved.

    Raises ValueError for values outside of these, and RuntimeError in `with` where torch's
    checkpoint is not built as known.
    """

    def __init__(
        self,
        policy: PolicyName | Callable[[SavedTensor], bool] = "auto",
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        use_streams: bool = True,
        window_bytes: int | None = None,
        keep_last: int = 1,
        keep_bytes: int = 0,
        device_backend: Backend | CopyEngine = "auto",
        on_mutation: OnMutation = "raise",
    ) -> None:
        _check_at_least("min_bytes", min_bytes, 0)
        _check_at_least("keep_last", keep_last, 0)
        _check_at_least("keep_bytes", keep_bytes, 0)
        if window_bytes is not None:
            _check_at_least("window_bytes", window_bytes, 0)
        if on_mutation not in get_args(OnMutation):
            raise ValueError(f"on_mutation={on_mutation!r} is neither 'raise' nor 'snapshot'")
        self._policy = make_policy(policy)
        self._telemetry = Telemetry()
        self._engine = choose_engine(device_backend, use_streams=use_streams)
        self._transfers: Transfers | None = None
        self._packer: Packer | None = None
        if not isinstance(self._engine, NullEngine):
            self._transfers = Transfers(
                self._engine,
                self._telemetry,
                self._policy,
                window_bytes=window_bytes,
                keep_last=keep_last,
                keep_bytes=keep_bytes,
                snapshot=on_mutation == "snapshot",
            )
            self._packer = Packer(self._transfers, self._policy, min_bytes)
        self._entered = _Entered()
        self._said = False

    def __enter__(self) -> Self:
        """Install the hooks for this thread."""
        stack = ExitStack()
        self._entered.stacks.append(stack)
        if self._transfers is None or self._packer is None:
            self._say_inert()
            return self
        try:
            _not_compiled(self._install)(stack, self._transfers, self._packer)
        except BaseException:
            self._entered.stacks.pop()
            stack.close()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the hooks; copies go on, nothing waits."""
        self._entered.stacks.pop().close()

    def stats(self) -> OffloadStats:
        """What was saved, moved and kept so far."""
        if self._transfers is None:
            return self._telemetry.stats([])
        return self._transfers.stats()

    def reset_stats(self) -> None:
        """Begin all counters and the trace again."""
        self._telemetry.reset()

    def explain(self) -> str:
        """A paragraph on what was moved, what was not, and why."""
        if isinstance(self._engine, NullEngine):
            return f"Nothing is moved: {self._engine.reason}."
        return explain(self.stats(), self._policy.explain(), self._engine.name)

    def chrome_trace(self) -> dict[str, Any]:
        """The last copies as a trace for chrome://tracing or Perfetto; see `Trace`."""
        return self._telemetry.trace.chrome()

    def synchronize(self) -> None:
        """Block the host until every copy issued so far has ended."""
        if self._transfers is not None:
            self._transfers.synchronize()

    def _install(self, stack: ExitStack, transfers: Transfers, packer: Packer) -> None:
        generation = transfers.begin_forward()
        hooks = _Hooks(packer, transfers, generation)
        stack.enter_context(checkpoints.listening(hooks))
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(
                _not_compiled(hooks.pack), _not_compiled(unpack_saved)
            )
        )
        stack.enter_context(regions.all_ended())

    def _say_inert(self) -> None:
        if not self._said:
            self._said = True
            logger.info("activation offload off: %s", self.explain())


class _Entered(threading.local):
    """What each thread has to undo, innermost last."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _Hooks:
    """One `with` of a context: the pack hook, and what checkpoints report to."""

    def __init__(self, packer: Packer, transfers: Transfers, generation: Generation) -> None:
        self._packer = packer
        self._transfers = transfers
        self._generation = generation

    def pack(self, tensor: torch.Tensor) -> Packed:
        """The pack hook."""
        role = Role(is_checkpoint_input=checkpoints.is_checkpoint_saving())
        return self._packer.pack(tensor, self._current(), role)

    def could_move(self, tensor: torch.Tensor) -> bool:
        """Whether a checkpoint should show a tensor that it keeps out of sight."""
        return self._packer.could_move(tensor)

    def pack_selective(self, tensor: torch.Tensor, version: int) -> Packed:
        """Pack what a selective checkpoint keeps."""
        role = Role(is_selective_save=True, version=version)
        return self._packer.pack(tensor, self._current(), role)

    def selective_stays(self, tensor: torch.Tensor) -> None:
        """Count what a selective checkpoint keeps out of reach."""
        self._packer.stays("selective", tensor)

    def _current(self) -> Generation:
        """The generation; a save after an unpack begins a further forward in the same context."""
        if self._generation.unpacked and torch._C._current_graph_task_id() == -1:
            self._generation = self._transfers.begin_forward()
        return self._generation


def choose_engine(
    device_backend: Backend | CopyEngine, *, use_streams: bool
) -> CopyEngine | NullEngine:
    """The engine of a backend's name, or the object itself.

    Raises ValueError for another name, and for "torch" and "native" where torch has no device that
    they can copy from; ImportError where "native" was not built.
    """
    if not isinstance(device_backend, str):
        return device_backend
    if device_backend == "sim":
        return SimEngine()
    if device_backend == "null":
        return NullEngine()
    if device_backend not in get_args(Backend):
        raise ValueError(
            f"device_backend={device_backend!r} is none of {get_args(Backend)} and no engine"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    served = ("cuda",) if device_backend == "native" else DEVICE_TYPES
    if accelerator is not None and accelerator.type in served:
        reason = why_not_here(accelerator.type, chosen=device_backend != "auto")
        if reason is not None:
            return NullEngine(reason)
        if device_backend == "native":
            return NativeEngine(use_streams=use_streams)
        return TorchEngine(accelerator.type, use_streams=use_streams)
    if device_backend != "auto":
        raise ValueError(
            f"device_backend={device_backend!r} needs a device of {served}, torch has "
            f"{accelerator}: 'auto' does nothing where there is none, 'sim' lets CPU tensors play "
            "a device's"
        )
    return NullEngine()


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which a compiler that meets it leaves alone."""
    return cast(Callable[..., Any], torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} is below {least}")
