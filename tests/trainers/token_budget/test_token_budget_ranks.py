"""Two processes with rows of unlike lengths: as many steps, the same weights, the same numbers."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import parity
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from budgeted import BUDGET, build
from torch.distributed.fsdp import fully_shard

import lowpeak_trainers
from lowpeak_trainers import add_fused_lm_head
from lowpeak_trainers.padding_free import PaddingFree
from lowpeak_trainers.token_budget.budget import TokenBudget
from lowpeak_trainers.token_budget.calls import GroupedModel
from lowpeak_trainers.token_budget.gradients import GroupedGradients

RANKS = 2
OPTIONS = {"use_cpu": True, "ddp_backend": "gloo", "max_steps": 3, "learning_rate": 3e-4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="no gloo spawn on Windows"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def join(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))


def train(rank: int, port: int, method: str, budget: int, folder: Path) -> None:
    join(rank, port)
    record, reports = parity.CompletionRecord(), []
    for tokens in (None, budget):
        torch.manual_seed(0)
        trainer = build(lowpeak_trainers, method, folder, max_tokens_per_batch=tokens, **OPTIONS)
        if method == "GRPO":
            (record.record if tokens is None else record.replay)(trainer)
        calls = []
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, calls=calls: calls.append(output.requires_grad)
        )
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        reports.append(
            {
                "logs": parity.logged(trainer),
                "calls": sum(calls),
                "weights": weights.double().sum().item(),
                "steps": trainer.state.global_step,
            }
        )
    (folder / str(rank)).write_text(json.dumps(reports))


@pytest.mark.parametrize(
    ("method", "budget"), [("DPO", BUDGET), ("DPO", 101), ("GRPO", BUDGET), ("Distillation", 30)]
)
def test_data_parallel(method, budget, tmp_path):
    """A budget of 101 leaves some batches whole, on one process and not on the other."""
    mp.spawn(train, args=(free_port(), method, budget, tmp_path), nprocs=RANKS)
    reports = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    for plain, budgeted in reports:
        assert budgeted["steps"] == plain["steps"] == 3
        assert budgeted["calls"] > plain["calls"]
        assert len(budgeted["logs"]) == len(plain["logs"]) == 4
        for found, wanted in zip(budgeted["logs"], plain["logs"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert budgeted["weights"] == pytest.approx(plain["weights"], rel=1e-6)
    first, second = (budgeted for _, budgeted in reports)
    assert first["weights"] == second["weights"]
    if budget == 101:
        assert first["calls"] != second["calls"]


def lengths_of(rank: int) -> list[int]:
    """Three groups within 20 tokens on one process, one on the other."""
    return [9, 12, 14, 6, 11] if rank == 0 else [7, 8, 3]


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    lengths = lengths_of(rank)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(5, 90, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def shard(rank: int, port: int, folder: Path) -> None:
    join(rank, port)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)

    def most(count: int) -> int:
        found = torch.tensor(count)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    gradients = []
    for tokens in (None, 20):
        torch.manual_seed(0)
        model = tiny.llama()
        add_fused_lm_head(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        batch, calls, pending = batch_of(rank), [], []
        model.model.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        if tokens is None:
            output = model(**batch, fused_lm_head=True)
        else:
            layout = PaddingFree()
            layout.switch(False)
            budget = TokenBudget(layout)
            budget.switch(tokens, None, most)

            def differentiate(parts, forecast, pending=pending, model=model):
                def quiet():
                    return unsynchronized(model)

                pending.append(GroupedGradients(parts, quiet, alone=False))
                return pending[0].leaves

            output = GroupedModel(model, budget, differentiate)(**batch, fused_lm_head=True)
        (output.log_probs.sum(1) ** 2).mean().backward()
        for grouped in pending:
            grouped.backward(synchronize=True)
        found = [p.grad.full_tensor().flatten() for p in model.parameters()]
        gradients.append((torch.cat(found), len(calls)))
    (plain, _), (grouped, passes) = gradients
    report = {
        "error": (grouped - plain).abs().max().item() / plain.abs().max().item(),
        "passes": passes,
    }
    (folder / str(rank)).write_text(json.dumps(report))
    dist.destroy_process_group()


@contextmanager
def unsynchronized(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def test_sharded_weights(tmp_path):
    """FSDP gathers weights in every pass, so both processes make as many."""
    mp.spawn(shard, args=(free_port(), tmp_path), nprocs=RANKS)
    reports = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    assert reports[0]["passes"] == reports[1]["passes"] > 5
    assert max(report["error"] for report in reports) <= 1e-5
