"""What autograd's graph holds in place of a saved tensor: all state there is about it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from lowpeak.offload.errors import mutation_error
from lowpeak.offload.prefetch import Generation
from lowpeak.offload.storage import Layout, is_nested, version_counter, with_counter
from lowpeak.offload.transfers import Transfers
from lowpeak.offload.unit import Unit


class Packed(ABC):
    """The packed form of one saved tensor; unpacking it leaves it as it was."""

    __slots__ = ("_witness",)
    _witness: "Witness"

    @property
    def changed(self) -> bool:
        """Whether the saved tensor was changed in place since."""
        return self._witness.changed

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """The tensor: same values, dtype, size, strides and device, without gradient."""


def unpack_saved(packed: Packed) -> torch.Tensor:
    """The unpack hook; it needs nothing but the handle."""
    return packed.unpack()


class Witness:
    """A saved tensor's version at saving, and its version counter without its memory."""

    __slots__ = ("_counter", "_origin", "_size", "version")

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor, version: int) -> None:
        self._counter = counter
        size = tensor._nested_tensor_size().tolist() if is_nested(tensor) else list(tensor.size())
        self._size = str(size)
        self.version = version
        # Kept as text: the node itself holds the handle, so holding the node would be a cycle.
        node = tensor.grad_fn
        self._origin = (
            "" if node is None else f", which is output {tensor.output_nr} of {node.name()},"
        )

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self._counter._version != self.version

    def check(self) -> None:
        """Raise autograd's own error if the tensor was changed in place since.

        Autograd compares versions only where no hook is installed.
        """
        version = self._counter._version
        if version != self.version:
            raise mutation_error(
                self._counter.type(), self._size, self._origin, version, self.version
            )

    def renew(self, data: torch.Tensor) -> torch.Tensor:
        """`data` with the saved tensor's version counter, so that later saves see it too."""
        return with_counter(self._counter, data)


class KeptTensor(Packed):
    """A tensor that stays on its device."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        # Without its node: an output that held it would never be freed (pytorch 189025). A leaf has
        # none, and is held itself, as autograd does: ZeRO-3 exchanges the data of parameters.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._witness = Witness(tensor, self._tensor, version)

    def unpack(self) -> torch.Tensor:
        """The tensor itself."""
        self._witness.check()
        return self._tensor


class MovedTensor(Packed):
    """A view of a unit."""

    __slots__ = ("_generation", "_layout", "_place", "_transfers", "_unit")

    def __init__(
        self, tensor: torch.Tensor, version: int, transfers: Transfers, generation: Generation
    ) -> None:
        self._transfers = transfers
        self._generation = generation
        self._witness = Witness(tensor, version_counter(tensor), version)
        self._unit: Unit
        self._layout: Layout
        self._place: int
        self._unit, self._layout, self._place = transfers.save(tensor, version, generation)

    def unpack(self) -> torch.Tensor:
        """The tensor, from wherever its bytes are."""
        transfers = self._transfers
        changed = self.changed
        if changed and not transfers.snapshot:
            self._witness.check()
        data = transfers.restore(
            self._unit, self._layout, self._place, self._generation, changed=changed
        )
        if changed:
            transfers.telemetry.count("snapshots", self._layout.unique_bytes)
            return data
        return self._witness.renew(data)


class TakenApart(Packed):
    """A wrapper subclass by its inner tensors."""

    __slots__ = ("_class", "_context", "_parts", "_size", "_stride")

    def __init__(
        self,
        tensor: torch.Tensor,
        hollow: torch.Tensor,
        version: int,
        parts: Mapping[str, object],
        context: object,
    ) -> None:
        self._class: Any = type(tensor)
        self._parts = parts
        self._context = context
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._witness = Witness(tensor, hollow, version)

    def unpack(self) -> torch.Tensor:
        """The wrapper, put together again."""
        self._witness.check()
        inner = {
            name: part.unpack() if isinstance(part, Packed) else part
            for name, part in self._parts.items()
        }
        tensor: torch.Tensor = self._class.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return tensor
