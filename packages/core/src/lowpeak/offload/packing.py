"""The pack hook: what becomes of a tensor that autograd saves."""

import logging
from typing import NamedTuple

import torch

from lowpeak.offload.handle import KeptTensor, MovedTensor, Packed, TakenApart
from lowpeak.offload.keeping import is_kept
from lowpeak.offload.policy import Policy, SavedTensor
from lowpeak.offload.prefetch import Generation
from lowpeak.offload.storage import (
    hollow_wrapper,
    is_held_by_leaf,
    layout_of,
    refusal,
    wrapper_parts,
)
from lowpeak.offload.transfers import Transfers

logger = logging.getLogger("lowpeak.offload")

# Other classes are wrappers, or have a meaning that bytes do not tell.
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Role(NamedTuple):
    """Who saves a tensor, where its class and bytes do not say."""

    is_checkpoint_input: bool = False
    is_selective_save: bool = False
    requires_grad: bool | None = None
    """That of the wrapper, for an inner tensor."""
    version: int | None = None
    """The version that counts as unchanged, where it is not the present one."""


SAVED_BY_A_NODE = Role()


class Packer:
    """Packs tensors: moved, taken apart, or kept and counted with the reason."""

    def __init__(self, transfers: Transfers, policy: Policy, min_bytes: int) -> None:
        self._transfers = transfers
        self._policy = policy
        self._min_bytes = min_bytes
        self._telemetry = transfers.telemetry
        self._engine = transfers.engine
        self._capture_told = False

    def pack(
        self, tensor: torch.Tensor, generation: Generation, role: Role = SAVED_BY_A_NODE
    ) -> Packed:
        """The handle for a tensor."""
        nbytes = tensor.numel() * tensor.element_size()
        version = tensor._version if role.version is None else role.version
        reason = self._reason_to_stay(tensor, nbytes)
        if reason is None and type(tensor) not in PLAIN:
            apart = self._take_apart(tensor, generation, role, version)
            if apart is not None:
                return apart
            reason = "subclass"
        self._count(nbytes, role)
        if reason is None:
            reason = self._choice(tensor, role)
        if reason is None:
            return MovedTensor(tensor, version, self._transfers, generation)
        self._telemetry.keep(reason, nbytes)
        self._transfers.poll(tensor.device)
        return KeptTensor(tensor, version)

    def could_move(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that autograd does not save is worth packing: it has a gradient."""
        if tensor.grad_fn is None:
            return False
        return self._reason_to_stay(tensor, tensor.numel() * tensor.element_size()) is None

    def stays(self, reason: str, tensor: torch.Tensor) -> None:
        """Count a tensor that was not packed."""
        self._telemetry.keep(reason, tensor.numel() * tensor.element_size())

    def _count(self, nbytes: int, role: Role) -> None:
        self._telemetry.count("saved", nbytes)
        if role.is_checkpoint_input:
            self._telemetry.count("checkpoint_inputs", nbytes)
        if role.is_selective_save:
            self._telemetry.count("selective", nbytes)

    def _reason_to_stay(self, tensor: torch.Tensor, nbytes: int) -> str | None:
        """Why a tensor stays whatever the policy thinks; cheap tests first."""
        if nbytes == 0:
            return "empty"
        if nbytes < self._min_bytes:
            return "small"
        if not self._engine.serves(tensor.device):
            return "other_device"
        if is_held_by_leaf(tensor):
            return "leaf"
        if torch._C._current_graph_task_id() != -1:
            return "in_backward"
        if is_kept():
            return "asked_for_first"
        if type(tensor) in PLAIN:
            reason = refusal(tensor)
            if reason is not None:
                return reason
        if self._engine.capturing(tensor.device):
            self._tell_capture()
            return "capture"
        return None

    def _choice(self, tensor: torch.Tensor, role: Role) -> str | None:
        """Why a plain tensor that could be moved stays, or None."""
        saved = SavedTensor(
            nbytes=layout_of(tensor).unique_bytes,
            size=tuple(tensor.size()),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=(
                tensor.requires_grad if role.requires_grad is None else role.requires_grad
            ),
            is_checkpoint_input=role.is_checkpoint_input,
            is_selective_save=role.is_selective_save,
        )
        if saved.nbytes < self._min_bytes:
            return "small"
        return None if self._policy.wants(saved) else "policy"

    def _take_apart(
        self, tensor: torch.Tensor, generation: Generation, role: Role, version: int
    ) -> Packed | None:
        """A wrapper subclass by its inner tensors; None if it cannot be."""
        parts = wrapper_parts(tensor)
        if parts is None:
            return None
        names, context = parts
        hollow = hollow_wrapper(tensor, names)
        if hollow is None:
            return None
        inner_role = role._replace(requires_grad=tensor.requires_grad, version=None)
        inner: dict[str, object] = {}
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                part = self.pack(part.detach(), generation, inner_role)
            inner[name] = part
        self._telemetry.count("subclasses", tensor.numel() * tensor.element_size())
        return TakenApart(tensor, hollow, version, inner, context)

    def _tell_capture(self) -> None:
        if not self._capture_told:
            self._capture_told = True
            logger.warning(
                "saved tensors stay on their device while a device graph is captured: a replay "
                "would not run the copies"
            )
