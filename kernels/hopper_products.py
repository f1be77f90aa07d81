"""What the head's products on Hopper share: the shape of their blocks, and what they can read.

They are persistent matrix products hidden @ weight^T on the tensor cores, a block of rows by a
block of the vocabulary at a time in float32, with the softmax in their epilogue: the logits need
not leave the registers. Two products with the same inputs have the same logits to the last bit, and
a row's do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .triton_shim import TRITON_AVAILABLE, jit, tl

# Of eight shapes the fastest on an H200, at [8192, 1152] x [262144, 1152] and [8192, 4096] x
# [128256, 4096].
BLOCK_N, BLOCK_V, BLOCK_H = 128, 256, 64
WARPS, STAGES = 8, 3
# Blocks of rows that walk the vocabulary together: 4096 rows stay in the L2 cache.
GROUP = 32
LOG2E = 1.4426950408889634
# Descriptors of blocks in memory need rows that start at multiples of 16 bytes.
_ALIGNMENT = 16


def products_serve(*factors: Tensor) -> bool:
    """Whether the kernels take these: Hopper's tensor memory copies, half precision, aligned rows.

    They are measured on compute capability 9.0 only, and used there only. `factors` [rows, columns]
    are what is multiplied, after casts.
    """
    device = factors[0].device
    if not TRITON_AVAILABLE or device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return all(
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % _ALIGNMENT == 0
        and x.data_ptr() % _ALIGNMENT == 0
        for x in factors
    )


@jit
def grouped(item, outer, inner, GROUP: tl.constexpr):
    """(outer index, inner index) of one of outer * inner blocks: GROUP outer blocks take every
    inner one before the next GROUP begins, so that what they read stays in the cache."""
    first = item // (GROUP * inner) * GROUP
    size = min(outer - first, GROUP)
    within = item % (GROUP * inner)
    return first + within % size, within // size


@jit
def logits_block(
    hidden,
    weight,
    start_n,
    start_v,
    features,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A block of hidden @ weight^T in float32, summed in the same order wherever it is made."""
    x = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start_h in range(0, features, BLOCK_H):
        # what lies outside of the tensors is read as zero
        block = weight.load([start_v, start_h])
        x = tl.dot(hidden.load([start_n, start_h]), block.T, x)
    return x


def programs(device: torch.device, blocks: int) -> int:
    """How many programs share the blocks of a result."""
    if device.type != "cuda":  # the interpreter
        return 1
    return min(blocks, torch.cuda.get_device_properties(device).multi_processor_count)


def descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    """What the tensor memory copies read x [rows, columns] through."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))


def factor_descriptors(hidden: Tensor, weight: Tensor) -> tuple[Any, Any]:
    """Descriptors of hidden [n, H] and a block [v, H] of the weight."""
    return descriptor(hidden, (BLOCK_N, BLOCK_H)), descriptor(weight, (BLOCK_V, BLOCK_H))


def compiled_variant(
    kernel: str,
    types: dict[str, str],
    flags: dict[str, bool],
    optional: dict[str, str | None],
    **constants: object,
) -> tuple[str, dict[str, str], Any, int]:
    """An entry of AOT_VARIANTS: `optional` pointers without a type are None."""
    types = dict(types)
    shape = {"BLOCK_N": BLOCK_N, "BLOCK_V": BLOCK_V, "BLOCK_H": BLOCK_H, "GROUP": GROUP}
    constants = shape | {"LOG2E": LOG2E} | constants | flags
    for pointer, kind in optional.items():
        if kind is None:
            constants[pointer] = None
        else:
            types[pointer] = f"*{kind}"
    return (kernel, types, constants, WARPS)


def factor_types(dtype: str) -> dict[str, str]:
    """Types of the arguments that both products of the head take, for AOT_VARIANTS."""
    types = {
        "hidden": f"tensordesc<{dtype}[{BLOCK_N}, {BLOCK_H}]>",
        "weight": f"tensordesc<{dtype}[{BLOCK_V}, {BLOCK_H}]>",
        "targets_ptr": "*i64",
    }
    types |= dict.fromkeys(("start", "rows", "width", "features", "programs"), "i32")
    return types | dict.fromkeys(("scale", "temperature"), "fp32")


# see products_serve
AOT_TARGETS = ("sm_90",)
