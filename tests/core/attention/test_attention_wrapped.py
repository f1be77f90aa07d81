"""Models inside DistributedDataParallel and FSDP2, which look at the arguments of their modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from attention_oracle import assert_same_gradients, documents, gradients, packed_row, tiny, weighted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowpeak.attention import register_attention

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Iterator[None]:
    register_attention()
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("marks", [True, False])
def test_distributed_data_parallel(marks: bool) -> None:
    model = tiny("gemma3_window_4", "lowpeak", CPU)
    row = packed_row(documents([7, 5, 9], CPU), marks=marks)
    wanted = gradients(model, lambda: weighted(model(**row).logits))
    wrapped = DistributedDataParallel(model)
    found = gradients(wrapped, lambda: weighted(wrapped(**row).logits))
    found = {name.removeprefix("module."): gradient for name, gradient in found.items()}
    assert_same_gradients(found, wanted, 1e-6)


@pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")
@pytest.mark.parametrize("marks", [True, False])
def test_fully_sharded_data_parallel(marks: bool) -> None:
    model = tiny("gemma3_window_4", "lowpeak", CPU)
    row = packed_row(documents([7, 5, 9], CPU), marks=marks)
    wanted = gradients(model, lambda: weighted(model(**row).logits))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    found = gradients(model, lambda: weighted(model(**row).logits))
    whole = {name: gradient.full_tensor() for name, gradient in found.items()}
    assert_same_gradients(whole, wanted, 1e-6)
