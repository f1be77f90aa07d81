"""Identity, version and geometry of the memory behind a tensor.

Three facts about a saved tensor outlive the tensor itself: which storage it was a view of (a weak
reference, never an address, which the allocator hands out again), where its elements lie in it,
and its version counter, which autograd compares in backward and any saved-tensor hook switches off.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Ranges begin at multiples of this, so that a restored tensor has its address's alignment (the
# caching allocators of devices return multiples of 512) and every dtype's offset is whole.
ALIGNMENT = 512


class Layout(NamedTuple):
    """Where a strided tensor's elements lie in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Byte offset of the first element in the storage."""
    stop: int
    """Byte offset behind the last element."""
    unique_bytes: int
    """Bytes of the elements, each expanded dimension counted once; at most stop - start."""

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        return self.stop - self.start

    @property
    def compact_size(self) -> tuple[int, ...]:
        """The size with expanded dimensions (stride 0) narrowed to one."""
        return tuple(n if s else 1 for n, s in zip(self.size, self.stride, strict=True))

    def moved(self, base: int) -> "Layout":
        """The same elements in a storage that begins at byte `base` of this one."""
        return self._replace(start=self.start - base, stop=self.stop - base)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a strided, non-empty tensor."""
    itemsize = tensor.element_size()
    size, stride = tuple(tensor.size()), tensor.stride()
    reach, count = 1, 1
    for n, s in zip(size, stride, strict=True):
        if s:
            reach += (n - 1) * s
            count *= n
    start = int(tensor.storage_offset()) * itemsize
    return Layout(
        tensor.dtype,
        size,
        stride,
        start,
        start + reach * itemsize,
        min(count, reach) * itemsize,
    )


def view_as(storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    """A plain tensor of this layout over a storage."""
    offset = layout.start // layout.dtype.itemsize
    empty = torch.empty(0, dtype=layout.dtype, device=storage.device)
    return empty.set_(storage, offset, layout.size, layout.stride)


def bytes_between(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """uint8 [stop - start] over a part of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (stop - start,), (1,))


class StorageReference:
    """A weak reference to a storage.

    While it lives the address in `identity` is not handed out again.
    """

    __slots__ = ("_nbytes", "_reference")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._nbytes = storage.nbytes()

    @property
    def identity(self) -> int:
        """A number that no other storage has while this reference exists."""
        return int(self._reference.cdata)

    def get(self) -> torch.UntypedStorage | None:
        """The storage, unless nobody holds it any more or it was resized (as FSDP does)."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._reference.cdata
        )
        return storage if storage is not None and storage.nbytes() == self._nbytes else None


@lru_cache(maxsize=64)
def _nothing(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, device=device, dtype=dtype)


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of `tensor` and holds none of its memory.

    `detach` shares counter and memory; assigning `data` exchanges the memory and leaves the
    counter.
    """
    counter = tensor.detach()
    counter.data = _nothing(tensor.device, tensor.dtype)
    return counter


def with_counter(counter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """`data` as a tensor that shares a version counter, as what autograd gives back does."""
    tensor = counter.detach()
    tensor.data = data
    return tensor


class Flattenable(Protocol):
    """A wrapper subclass: its memory is that of named inner tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        """Names of the inner tensors, and what else it takes to rebuild the wrapper."""


def is_nested(tensor: torch.Tensor) -> bool:
    """Whether it is a strided nested tensor, which has no size; jagged ones have."""
    return tensor.is_nested and tensor.layout is torch.strided


def refusal(tensor: torch.Tensor) -> str | None:
    """Why the raw bytes of a plain tensor do not tell its value, or None."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "layout"
    if tensor.is_quantized:
        return "quantized"
    if tensor.device.type == "meta":
        return "other_device"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "subclass"
    return None


def is_held_by_leaf(tensor: torch.Tensor) -> bool:
    """Whether somebody outside the graph holds the memory: a parameter, a leaf with gradient.

    The graph's node that accumulates a leaf's gradient holds the leaf itself, so a copy of it, or
    of a view of it, frees nothing.
    """
    base = tensor._base
    owner = tensor if base is None else base
    if isinstance(owner, torch.nn.Parameter) or (owner.requires_grad and owner.is_leaf):
        return True
    return isinstance(owner, torch.nn.Buffer)


def wrapper_parts(tensor: torch.Tensor) -> tuple[list[str], object] | None:
    """Names of what a wrapper subclass is made of, and its context; None for other tensors.

    The names are those of tensors, and (torch 2.13, DTensor's mesh) of other objects.
    """
    # As objects: to a type checker no tensor can be a wrapper, as its signatures differ.
    candidate: object = tensor
    if tensor.is_nested or not is_traceable_wrapper_subclass(candidate):
        return None
    return cast(Flattenable, candidate).__tensor_flatten__()


def hollow_wrapper(wrapper: torch.Tensor, names: list[str]) -> torch.Tensor | None:
    """A wrapper that shares the version counter and holds none of the inner tensors' memory.

    None where the inner tensors are no attributes that can be set.
    """
    hollow = wrapper.detach()
    for name in names:
        inner = getattr(wrapper, name)
        if not isinstance(inner, torch.Tensor):
            continue
        try:
            setattr(hollow, name, _nothing(inner.device, inner.dtype))
        except AttributeError:
            return None
    return hollow
