"""Computing an expectation waits for no other process, and on a GPU for no result."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import methods
import parity
import pytest
import torch
import torch.multiprocessing as mp
import trl
from test_expectations import OLD, steps

import lowpeak_trainers
from lowpeak.lm_head import expectation_counts
from lowpeak_trainers import expectations

RANKS = 2
# Of unlike lengths: the ranks have different numbers of chunks.
CASES = {"SFT": {"loss_type": "dft"}, "GRPO": {**OLD, "entropy_coef": 0.01}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def work(rank: int, port: int, method: str, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    options = {"use_cpu": True, "ddp_backend": "gloo", **CASES[method]}
    logs = []
    for package in (trl, lowpeak_trainers):
        torch.manual_seed(0)
        trainer = methods.build(package, method, folder, options=steps(options))
        trainer.train()
        logs.append(parity.logged(trainer))
    counts = expectation_counts()["fused_lm_head"]
    report = {"logs": logs, "held": counts.held, "missed": counts.missed}
    (folder / str(rank)).write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no gloo spawn on Windows")
@pytest.mark.parametrize("method", CASES)
def test_holds_on_two_ranks(method, tmp_path):
    mp.spawn(work, args=(free_port(), method, tmp_path), nprocs=RANKS)
    for rank in range(RANKS):
        report = json.loads((tmp_path / str(rank)).read_text())
        assert report["held"] >= 7
        assert report["missed"] == 0
        stock, ours = report["logs"]
        for wanted, found in zip(stock, ours, strict=True):
            numbers = {name: x for name, x in wanted.items() if isinstance(x, float)}
            assert found == {
                **found,
                **{k: pytest.approx(x, 1e-5, 1e-5) for k, x in numbers.items()},
            }


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, OLD, {**OLD, "entropy_coef": 0.01}])
def test_grpo_loss_is_replayed_without_a_synchronisation(options, tmp_path, monkeypatch):
    replays = []

    def watched(trainer, inputs):
        loss = replay(trainer, inputs)

        def without_synchronisation(output):
            torch.cuda.set_sync_debug_mode("error")
            try:
                replays.append(loss(output))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return replays[-1]

        return without_synchronisation

    replay = expectations.grpo_loss
    monkeypatch.setattr(expectations, "grpo_loss", watched)
    methods.build(lowpeak_trainers, "GRPO", tmp_path, options=steps(options)).train()
    assert len(replays) >= 8
