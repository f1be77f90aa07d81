"""Distributed tensors move by their local shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowpeak.offload import OffloadActivations, SimEngine


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, seed: int) -> DTensor:
    torch.manual_seed(seed)
    return distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])


def offload() -> OffloadActivations:
    engine = SimEngine(mode="laziest")
    return OffloadActivations("all", min_bytes=1, keep_last=0, device_backend=engine)


def test_gradients_are_exact_and_shards_leave(mesh: DeviceMesh) -> None:
    def gradient(context: AbstractContextManager[object]) -> Tensor:
        weight = sharded(mesh, 0).requires_grad_()
        with context:
            out = (sharded(mesh, 1) @ weight).sin().exp().tanh()
        out.square().sum().backward()
        assert isinstance(weight.grad, DTensor)
        return weight.grad.full_tensor()

    context = offload()
    assert torch.equal(gradient(context), gradient(nullcontext()))
    stats = context.stats()
    assert stats.subclasses.count >= 3
    assert stats.copied_out.count >= 3
    assert "subclass" not in stats.kept
    assert stats.host_bytes == 0


def test_changes_of_a_wrapper_are_seen(mesh: DeviceMesh) -> None:
    with offload():
        product = sharded(mesh, 0).requires_grad_() * 1
        out = product.sin()
    with torch.no_grad():
        product.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
