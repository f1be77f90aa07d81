"""Which saved tensors leave their device, and whether any should."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

logger = logging.getLogger("lowpeak.offload")

PolicyName = Literal["auto", "checkpoint_inputs", "all"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a policy is told about a tensor that autograd saves."""

    nbytes: int
    """Bytes of its elements, expanded dimensions counted once."""
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    """False for masks, tables, ids and all else that no gradient flows into."""
    is_checkpoint_input: bool
    """It is an input of torch.utils.checkpoint, which recomputes from it."""
    is_selective_save: bool
    """It is a result that a selective checkpoint keeps."""


class Policy(Protocol):
    """Chooses among the tensors that can be moved."""

    def wants(self, saved: SavedTensor) -> bool:
        """Whether this one leaves its device."""

    def opens(self, waiting_bytes: int, window_bytes: int) -> bool:
        """Whether copies may start, with so many bytes chosen and not copied."""

    def forward_begins(self, memory: "Measure") -> None:
        """The context was entered."""

    def observe(self, memory: "Measure", host_bytes: int) -> None:
        """A tensor was saved or asked for, while `host_bytes` were away."""

    def explain(self) -> str:
        """What is chosen and why, in a sentence."""


class Memory(NamedTuple):
    """Bytes of a device that torch has allocated."""

    peak: int
    """The most so far."""
    allocated: int
    """Now."""


Measure = Callable[[], dict[torch.device, Memory]]
"""Measures each device that was moved from; empty where the engine cannot."""


class FixedPolicy:
    """A rule that holds for good."""

    def __init__(self, rule: Callable[[SavedTensor], bool], name: str) -> None:
        self._rule = rule
        self._name = name

    def wants(self, saved: SavedTensor) -> bool:
        """What the rule says."""
        return bool(self._rule(saved))

    def opens(self, waiting_bytes: int, window_bytes: int) -> bool:
        """Always."""
        return True

    def forward_begins(self, memory: Measure) -> None:
        """Nothing to learn."""

    def observe(self, memory: Measure, host_bytes: int) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        """The rule's name."""
        return f"{self._name} is moved, as asked for"


def is_recomputed_from(saved: SavedTensor) -> bool:
    """Inputs of checkpoints that a gradient flows into, and what selective checkpoints keep.

    An input without gradient is a mask, a table or ids: shared by all layers, so that moving it
    frees nothing and brings it back once a layer.
    """
    return saved.is_selective_save or (saved.is_checkpoint_input and saved.requires_grad)


class AutoPolicy:
    """Checkpoint inputs where checkpointing is on, everything large where it is not.

    And nothing while that cannot lower the peak:
    * the first bytes wait on their device until more of them are chosen than the window holds, as
      the copies in flight would hold as much;
    * in the first forward and backward with copies, the peak up to every saved tensor and every
      unpack is noted together with the bytes that were away then. Their sum, and what the step
      left allocated (the first step makes the optimizer's states), bound the peak without
      offloading; where the step's true peak (the optimizer's, say) is not below the bound, the
      copies cannot lower it, and they stay off until a forward saves more bytes than this one.
    """

    def __init__(self) -> None:
        self._mode: Literal["undecided", "checkpoint_inputs", "all"] = "undecided"
        self._open = False
        self._asked = False
        self._checkpointed = False
        self._chosen_bytes = 0
        self._useless_bytes = 0
        self._bounds: dict[torch.device, int] | None = {}
        self._at_begin: dict[torch.device, int] = {}
        self._reason = "nothing was saved yet"

    def wants(self, saved: SavedTensor) -> bool:
        """By the mode, which the first checkpoint input of a forward settles."""
        self._asked = True
        if saved.is_checkpoint_input or saved.is_selective_save:
            self._checkpointed = True
            if self._mode != "checkpoint_inputs":
                self._mode = "checkpoint_inputs"
                if self._open:
                    self._say(f"on for {self._title()}")
        wanted = is_recomputed_from(saved) if self._mode == "checkpoint_inputs" else True
        if wanted:
            self._chosen_bytes += saved.nbytes
        return wanted

    def opens(self, waiting_bytes: int, window_bytes: int) -> bool:
        """Once more bytes wait than the window, or a forward known to gain nothing, holds."""
        if not self._open and waiting_bytes > max(window_bytes, self._useless_bytes):
            self._open = True
            if self._mode == "undecided":
                self._mode = "all"
            self._useless_bytes = 0
            self._say(f"on for {self._title()}")
        return self._open

    def forward_begins(self, memory: Measure) -> None:
        """Judge the step before, once."""
        if self._open and self._bounds:
            self._judge(memory())
        elif not self._open:
            self._say(self.explain())
        if self._bounds is not None:
            measured = memory()
            self._at_begin = {device: now.allocated for device, now in measured.items()}
        if self._mode == "checkpoint_inputs" and self._asked and not self._checkpointed:
            # Checkpointing was switched off.
            self._mode, self._open = "undecided", False
        self._asked = self._checkpointed = False
        self._chosen_bytes = 0
        self._open = self._open and not self._useless_bytes

    def observe(self, memory: Measure, host_bytes: int) -> None:
        """Note the bound, in the first step with copies."""
        if self._bounds is None or not self._open:
            return
        for device, measured in memory().items():
            self._bounds[device] = max(self._bounds.get(device, 0), measured.peak + host_bytes)

    def explain(self) -> str:
        """Mode and reason."""
        if self._open or self._useless_bytes or not self._chosen_bytes:
            return self._reason
        return (
            f"off: {self._chosen_bytes} bytes of {self._title()} are fewer than copies in flight "
            "would hold"
        )

    def _judge(self, memory: dict[torch.device, Memory]) -> None:
        bounds = self._bounds
        assert bounds is not None
        self._bounds = None
        if all(
            device in self._at_begin
            and bound + max(0, memory[device].allocated - self._at_begin[device])
            <= memory[device].peak
            for device, bound in bounds.items()
        ):
            self._useless_bytes = self._chosen_bytes
            self._bounds = {}
            peak = max(measured.peak for measured in memory.values())
            self._say(
                f"off: the peak of {peak} bytes is outside of forward and backward, and would be "
                f"no higher with {self._chosen_bytes} bytes of {self._title()} on the device"
            )

    def _title(self) -> str:
        return {
            "checkpoint_inputs": "checkpoint inputs (checkpointing is on)",
            "all": "all large saved tensors (no checkpointing)",
            "undecided": "large saved tensors",
        }[self._mode]

    def _say(self, reason: str) -> None:
        """Explain with the latest numbers, log where it is switched on or off."""
        verdict = reason.partition(":")[0]
        if verdict != self._reason.partition(":")[0]:
            logger.info("activation offload %s", reason)
        self._reason = reason


def make_policy(policy: PolicyName | Callable[[SavedTensor], bool]) -> Policy:
    """The policy of a name or a function."""
    if policy == "auto":
        return AutoPolicy()
    if policy == "checkpoint_inputs":
        return FixedPolicy(is_recomputed_from, "what checkpoints recompute from")
    if policy == "all":
        return FixedPolicy(lambda saved: True, "every large saved tensor")
    if callable(policy):
        return FixedPolicy(policy, f"what {policy!r} chooses")
    raise ValueError(
        f"policy={policy!r} is none of 'auto', 'checkpoint_inputs', 'all', and no function of a "
        "SavedTensor"
    )
