"""Two processes, whose batches differ in length, get the metrics of the whole set."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import tiny
import torch.multiprocessing as mp
from test_tile_metrics import all_metrics, assert_right, build

RANKS = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="no gloo spawn on Windows"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def evaluate(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    options = {"use_cpu": True, "ddp_backend": "gloo", "per_device_eval_batch_size": 1}
    reports = []
    for accumulated in (None, 1):
        trainer = build(
            folder,
            all_metrics(),
            model=tiny.llama(),
            eval_accumulation_steps=accumulated,
            **options,
        )
        reports.append(trainer.evaluate())
    # one document has no target: a process sees no tile
    ids = tiny.random_ids(9, 3)
    rows = [{"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": [-100] * 9}]
    reports.append(trainer.evaluate(tiny.Dataset.from_list(rows)))
    (folder / str(rank)).write_text(json.dumps(reports))


def test_ranks_add_up(tmp_path):
    mp.spawn(evaluate, args=(free_port(), tmp_path), nprocs=RANKS)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS))
    for reports in (first, second):
        assert_right(reports[0], tiny.llama())
        assert_right(reports[1], tiny.llama())
    name = "eval_perplexity"
    assert [x[name] for x in first] == [x[name] for x in second]
    assert first[2][name] != first[1][name]
