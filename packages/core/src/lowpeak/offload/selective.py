"""What selective checkpoints keep: results in a dictionary that no saved-tensor hook sees.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` returns two dispatch modes with one
dictionary: the first puts results into it while the region runs forward, the second takes them out
while it is recomputed. After the forward of the region each tensor in it is exchanged for its
handle, in an object that answers as torch's own wrapper does.
"""

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._pytree import tree_map_only

from lowpeak.offload.handle import Packed

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
NAMES = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode", "_VersionWrapper")


class SelectivePacker(Protocol):
    """Packs what a selective checkpoint keeps."""

    def pack_selective(self, tensor: torch.Tensor, version: int) -> Packed:
        """The handle for a tensor at a version."""

    def selective_stays(self, tensor: torch.Tensor) -> None:
        """Count a tensor that cannot be packed."""


def check_torch() -> None:
    """Raise RuntimeError where torch's selective checkpoint is not built as known here."""
    missing = [name for name in NAMES if not hasattr(torch_checkpoint, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__}: torch.utils.checkpoint has no {', '.join(missing)}; use a "
            "torch that lowpeak supports, or checkpoint without context_fn"
        )


class PackedSave:
    """A kept tensor's place in the dictionary; answers as torch's `_VersionWrapper`."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        """The tensor; RuntimeError, in torch's words, if it was changed in place since."""
        if self._packed.changed:
            raise RuntimeError(MUTATED)
        return self._packed.unpack()


class Selective:
    """One region's `context_fn`, and the two contexts that it made."""

    def __init__(self, context_fn: Callable[[], Contexts]) -> None:
        self._context_fn = context_fn
        self._made: Contexts | None = None

    def contexts(self) -> Contexts:
        """What torch calls in place of `context_fn`."""
        self._made = self._context_fn()
        return self._made

    def pack(self, packer: SelectivePacker) -> None:
        """Exchange the kept tensors for their handles, the last kept first.

        Backward takes them out in the order of the forward, and fetches ahead in the reversed
        order of packing.
        """
        if self._made is None:
            return
        check_torch()
        forward, recompute = self._made
        self._made = None
        if not isinstance(forward, torch_checkpoint._CachingTorchDispatchMode):
            return
        changes_allowed = (
            not isinstance(recompute, torch_checkpoint._CachedTorchDispatchMode)
            or recompute.allow_cache_entry_mutation
        )

        def packed(wrapper: Any) -> Any:
            tensor = wrapper.val
            if not isinstance(tensor, torch.Tensor):
                return wrapper
            if changes_allowed or tensor._version != wrapper.version:
                packer.selective_stays(tensor)
                return wrapper
            return PackedSave(packer.pack_selective(tensor, wrapper.version))

        for entries, key in reversed(list(_places(forward.storage))):
            entries[key] = tree_map_only(torch_checkpoint._VersionWrapper, packed, entries[key])


def _places(storage: MutableMapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Every entry: each operator has one dict (torch 2.13) or list (earlier) of them."""
    for entries in storage.values():
        if isinstance(entries, MutableMapping):
            yield from ((entries, key) for key in entries)
        elif isinstance(entries, MutableSequence):
            yield from ((entries, number) for number in range(len(entries)))
