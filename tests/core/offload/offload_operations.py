"""Operations of the random graphs: each makes a [4, 4] value of two and has its own saves.

All values are square, so that a transpose that was mistaken for its base changes numbers instead
of raising; strides, offsets, dtypes and sizes of what autograd saves vary inside the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

SIDE = 4


@dataclass
class Leaves:
    """What gradients are taken of, made anew for each run from one seed, and a buffer."""

    inputs: list[Tensor]
    weight: nn.Parameter
    fused: nn.Parameter
    bias: nn.Parameter
    scale: nn.Parameter
    table: nn.Parameter
    buffer: Tensor
    indices: Tensor
    unused: list[Tensor] = field(default_factory=list)
    """Results that stay alive, and their graphs with them, and that no loss depends on."""

    def all(self) -> list[Tensor]:
        return [*self.inputs, self.weight, self.fused, self.bias, self.scale, self.table]


def make_leaves(seed: int, device: torch.device | str = "cpu") -> Leaves:
    """The same values for the same seed; the second input has odd strides and an offset."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    odd = normal(2 * SIDE + 1, 3 * SIDE)[1::2, 2::3].detach()
    return Leaves(
        inputs=[normal(SIDE, SIDE).requires_grad_(), odd.requires_grad_()],
        weight=nn.Parameter(normal(SIDE, SIDE)),
        fused=nn.Parameter(normal(3 * SIDE, SIDE)),
        bias=nn.Parameter(normal(SIDE)),
        scale=nn.Parameter(normal(SIDE)),
        table=nn.Parameter(normal(6, SIDE)),
        buffer=normal(SIDE, SIDE),
        indices=torch.randint(0, 6, (SIDE,), generator=generator).to(device),
    )


class SavesEverything(torch.autograd.Function):
    """Saves inputs, its output, an intermediate, views, a CPU tensor, None, and plain objects."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> Tensor:
        middle = x.detach().sin()
        out = middle * y * factor
        aside = torch.full((3,), factor, dtype=torch.float64)
        ctx.save_for_backward(x, y, out, middle, None, aside, *y.chunk(2))
        ctx.factor = factor
        ctx.notes = ("a tuple", [1, 2])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y, out, middle, nothing, aside, upper, lower = ctx.saved_tensors
        assert nothing is None
        assert aside.device.type == "cpu"
        assert ctx.notes == ("a tuple", [1, 2])
        kept = torch.cat([upper, lower])
        spread = aside[0].item() * gradients[0]
        return spread * kept * x.cos() + 0.0 * out, spread * middle + 0.0 * y, None


class SavesOtherDtypes(torch.autograd.Function):
    """Saves one storage as int32, as bytes, and an int64 permutation and a bool mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = x.detach().sum(0).argsort()
        own = x.detach().clone(memory_format=torch.contiguous_format)
        mask = own > 0
        ctx.save_for_backward(own.view(torch.int32), own.view(torch.uint8), order, mask)
        return torch.where(mask, own, own * own)[:, order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        words, octets, order, mask = ctx.saved_tensors
        own = words.view(torch.float32)
        assert torch.equal(octets.view(torch.int32), words)
        back = torch.empty_like(gradients[0])
        back[:, order] = gradients[0]
        return torch.where(mask, back, 2 * own * back)


class TwoOutputs(torch.autograd.Function):
    """Saves both outputs; only the first is used by what follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.tanh(), x.t().sigmoid()
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx: FunctionCtx | Any, *gradients: Tensor) -> Tensor:
        first, second = ctx.saved_tensors
        return gradients[0] * (1 - first * first) + (gradients[1] * second * (1 - second)).t()


def strided(x: Tensor, argument: int) -> Tensor:
    """The values of x in a larger storage: a step of 2 or 3, an offset, rows or columns first."""
    step = 2 + argument % 2
    wide = x.new_zeros(SIDE + 2, step * SIDE + 1)
    view = wide[1 : SIDE + 1, argument % 2 : argument % 2 + step * SIDE : step]
    view = view.t() if argument & 4 else view
    return view.copy_(x)


Operation = Callable[[Tensor, Tensor, Leaves, int], Tensor]


def _views(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    first, second = x.chunk(2, dim=argument % 2)
    third, fourth = y.split(SIDE // 2, dim=argument % 2)
    return torch.cat([first * fourth, second.sin() * third], dim=argument % 2)


def _edit_unsaved(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    z = x + y
    z.mul_(0.5)
    if argument & 1:
        z[1:3].add_(1.0)
    if argument & 2:
        z.relu_()
    return z


def _edit_between(x: Tensor, y: Tensor, leaves: Leaves, argument: int) -> Tensor:
    z = x * y
    leaves.unused.append(z.sin() if argument & 1 else z[1:].exp())
    (z[:2] if argument & 2 else z).add_(0.5)
    return z.cos() * z


def _edit_saved(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    z = (x * y).tanh()
    used = z.sin() if argument & 1 else z
    (z[:2] if argument & 2 else z).add_(0.25)
    return used if argument & 4 else z


def _edit_leaf(x: Tensor, _y: Tensor, leaves: Leaves, argument: int) -> Tensor:
    kept: Tensor = leaves.scale if argument & 1 else leaves.buffer
    z = x * kept
    with torch.no_grad():
        kept.add_(0.0)
    return z


def _in_bfloat16(x: Tensor, y: Tensor, _leaves: Leaves, _argument: int) -> Tensor:
    return (x.bfloat16() * y.bfloat16().t()).float()


def _complex(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    a = torch.view_as_complex(x.reshape(-1, 2).contiguous())
    b = torch.view_as_complex(y.reshape(-1, 2).contiguous())
    product = a.conj() * b if argument & 1 else a * b.conj() * a.conj()
    return torch.view_as_real(product).reshape(SIDE, SIDE)


def _without_gradient(x: Tensor, y: Tensor, leaves: Leaves, argument: int) -> Tensor:
    with torch.no_grad():
        factor = functional.linear(y.sin(), leaves.weight).tanh()
    return x * (factor if argument & 1 else factor.t())


def _linear_of_parts(x: Tensor, y: Tensor, leaves: Leaves, argument: int) -> Tensor:
    query, key, value = leaves.fused.chunk(3)
    weight = (query, key.t(), value)[argument % 3]
    return functional.linear(x, weight) * functional.linear(y, leaves.weight, leaves.bias)


def _scalars(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    empty = (x[:0] * y[:0]).sum()
    return x * y.mean() + (y.amax() if argument & 1 else empty)


def _expand(x: Tensor, y: Tensor, _leaves: Leaves, argument: int) -> Tensor:
    row = x[argument % SIDE]
    wide = row.expand(SIDE, SIDE) if argument & 1 else row.unsqueeze(1).expand(SIDE, SIDE)
    return wide * y + wide.exp().tanh()


OPERATIONS: dict[str, Operation] = {
    "linear": lambda x, _y, leaves, _n: functional.linear(x, leaves.weight, leaves.bias),
    "linear_of_parts": _linear_of_parts,
    "matmul": lambda x, y, _leaves, _n: x @ y,
    "multiply": lambda x, y, _leaves, _n: x * y,
    "transposed": lambda x, _y, _leaves, _n: x * x.t() + x.t().sin(),
    "reshaped": lambda x, y, _leaves, _n: (x.reshape(2, -1) * y.reshape(2, -1)).view(SIDE, SIDE),
    "views": _views,
    "expand": _expand,
    "softmax": lambda x, _y, _leaves, n: functional.softmax(x, dim=n % 2),
    "layer_norm": lambda x, _y, leaves, _n: functional.layer_norm(
        x, (SIDE,), leaves.scale, leaves.bias
    ),
    "activations": lambda x, y, _leaves, _n: x.relu() + functional.gelu(y) + x.tanh().exp(),
    "embedding": lambda x, _y, leaves, _n: x * functional.embedding(leaves.indices, leaves.table),
    "gather": lambda x, y, _leaves, n: x.max(dim=n % 2, keepdim=True).values * y[:, [2, 0, 3, 1]],
    "dropout": lambda x, _y, _leaves, _n: functional.dropout(x, 0.3),
    "strided": lambda x, y, _leaves, n: strided(x, n) * strided(y, n + 1),
    "bfloat16": _in_bfloat16,
    "complex": _complex,
    "scalars": _scalars,
    "edit_unsaved": _edit_unsaved,
    "edit_between": _edit_between,
    "without_gradient": _without_gradient,
    "saves_everything": lambda x, y, _leaves, n: SavesEverything.apply(x, y, 0.5 + n),
    "saves_other_dtypes": lambda x, _y, _leaves, _n: SavesOtherDtypes.apply(x),
    "two_outputs": lambda x, _y, _leaves, _n: TwoOutputs.apply(x)[0],
}
# Plain autograd refuses the backward of these, in most uses.
FORBIDDEN: dict[str, Operation] = {"edit_saved": _edit_saved, "edit_leaf": _edit_leaf}
