"""Tests of the trainers: what the peers themselves warn about is not an error of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

PEERS = "(accelerate|datasets|peft|torch|transformers|trl)"
PEER_WARNINGS = [
    # transformers 5.24 renames gradient_checkpointing, TRL 1.16 still sets the old name.
    f"ignore::FutureWarning:{PEERS}",
    f"ignore::DeprecationWarning:{PEERS}",
    # TRL names the caller of compute_loss, which is ours.
    "ignore:`return_outputs=True`:FutureWarning:lowpeak_trainers",
    # Pinned memory without an accelerator, reentrant checkpoints under no_grad and the like.
    f"ignore::UserWarning:{PEERS}",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for line in PEER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(line))
