"""Runs of all trainers with and without `activation_offloading`, which must be the same runs."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import methods
import oracle
import parity
import tiny
import torch
from transformers import Trainer

import lowpeak_trainers
from lowpeak.offload import OffloadActivations, SimEngine
from lowpeak_trainers import offloading

METHODS = (*methods.METHODS, "Distillation", "Reward")
COMPLETIONS = [[7, 9, 11, 2], [13, 8, 2], [40, 41, 42, 43, 44, 2], [90, 2]]


def build(package: ModuleType, method: str, folder: Path, **options: Any) -> Trainer:
    """A trainer of two steps of two batches; options but model and peft_config go to its config."""
    keywords = {name: options.pop(name) for name in ("model", "peft_config") if name in options}
    options = {"max_steps": 2, **options}
    if method not in ("Distillation", "Reward"):
        trainer = methods.build(package, method, folder, options=options, **keywords)
    elif method == "Reward":
        trainer = package.RewardTrainer(
            model=tiny.reward_model(),
            args=package.RewardConfig(**parity.settings(folder, **options)),
            train_dataset=tiny.preferences(methods.PAIRS),
            processing_class=tiny.tokenizer(),
        )
    else:
        options = {"per_device_train_batch_size": 4, "max_completion_length": 8, **options}
        trainer = package.DistillationTrainer(
            model=tiny.llama(),
            teacher_model=tiny.llama(seed=2),
            args=package.DistillationConfig(**parity.settings(folder, **options)),
            train_dataset=tiny.prompts(methods.LENGTHS),
            processing_class=tiny.tokenizer(),
        )
    if method in ("GRPO", "RLOO", "Distillation"):
        _script(trainer)
    return trainer


def _script(trainer: Trainer) -> None:
    """Let the model "generate" COMPLETIONS, whatever the number of prompts."""
    width = max(map(len, COMPLETIONS))
    rows = torch.tensor([[*ids, *[tiny.PAD] * (width - len(ids))] for ids in COMPLETIONS])

    @functools.wraps(trainer.model.generate)
    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        repeated = rows.repeat(-(-len(input_ids) // len(rows)), 1)[: len(input_ids)]
        return torch.cat([input_ids, repeated.to(input_ids.device)], dim=1)

    trainer.model.generate = generate


def move_everything(monkeypatch: Any, device: torch.device, **options: Any) -> list[Any]:
    """Let trainers move the smallest tensors, at once; on a CPU to a simulated host.

    The list fills with the OffloadActivations that trainers make from now on.
    """
    made: list[Any] = []

    def make(device_backend: Any) -> OffloadActivations:
        assert device_backend == ("null" if device.type == "cpu" else "auto")
        if device.type == "cpu":
            device_backend = SimEngine(seed=len(made), mode="laziest")
        chosen = {"min_bytes": 0, "window_bytes": 0, **options}
        made.append(OffloadActivations(device_backend=device_backend, **chosen))
        return made[-1]

    monkeypatch.setattr(offloading, "OffloadActivations", make)
    return made


def assert_same_training(
    method: str, folder: Path, package: ModuleType = lowpeak_trainers, **options: Any
) -> Trainer:
    """Train with and without offloading: same logs, same gradients. Returns the one with it."""
    model = options.pop("model", None)
    trainers, records = [], []
    for offloads in (False, True):
        chosen = {**options, "activation_offloading": True} if offloads else options
        if model is not None:
            chosen = {**chosen, "model": model()}
        trainer = build(package, method, folder, **chosen)
        records.append(oracle.GradientRecord())
        trainer.add_callback(records[-1])
        trainer.train()
        trainers.append(trainer)
    assert_same_steps(records[1].steps, records[0].steps)
    if torch.cuda.is_available():
        parity.assert_same_logs(trainers[1], trainers[0])
    else:
        assert parity.logged(trainers[1]) == parity.logged(trainers[0])
    return trainers[1]


def assert_same_steps(found: list[Any], wanted: list[Any]) -> None:
    """The gradients of every step, bit for bit; on a GPU within what atomic sums may move."""
    assert found
    for ours, plain in zip(found, wanted, strict=True):
        if torch.cuda.is_available():
            oracle.assert_same_gradients(ours, plain)
            continue
        assert ours.keys() == plain.keys()
        for name, gradient in plain.items():
            assert torch.equal(ours[name], gradient), name
