"""FSDP2 on two CPU ranks: the self-test and the step leave the sharding as they found it."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import tiny_model, token_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from lowpeak.models import install_fused_forward

RANKS = 2
# What accelerate makes of a model with and without a norm before its head; and the case that TRL
# trains on gradients that are not summed over the ranks.
UNITS = ("head in the root", "head with norm", "head alone")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    batch = token_batch()
    return batch if rank == 0 else {name: value.flip(0) for name, value in batch.items()}


def train_two_steps(rank: int, units: str, whole: PreTrainedModel) -> str:
    """Largest error of a gradient of two steps, or what was refused."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = tiny_model("llama", head_scale=5.0)
    install_fused_forward(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if units == "head with norm":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    elif units == "head alone":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    errors = []
    for _ in range(2):
        model.zero_grad()
        try:
            model(**batch_of(rank), fused_lm_head=True).loss.backward()
        except ValueError as error:
            return str(error)
        for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
            difference = sharded.grad.full_tensor() - expected.grad
            errors.append((difference.norm() / expected.grad.norm()).item())
    return str(max(errors))


def work(rank: int, port: int, report: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    whole = tiny_model("llama", head_scale=5.0)
    sum(whole(**batch_of(other)).loss / RANKS for other in range(RANKS)).backward()
    results = {units: train_two_steps(rank, units, whole) for units in UNITS}
    if rank == 0:
        report.write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no gloo spawn on Windows")
def test_gradients_equal_those_of_one_process(tmp_path: Path) -> None:
    report = tmp_path / "report"
    mp.spawn(work, args=(free_port(), report), nprocs=RANKS)
    results = json.loads(report.read_text())
    assert float(results["head in the root"]) < 1e-5
    assert float(results["head with norm"]) < 1e-5
    assert "the LM head's weight is sharded" in results["head alone"]
