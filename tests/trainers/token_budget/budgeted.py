"""Trainers of every method that takes a budget of tokens, and what their models were given."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import methods
import parity
import tiny
import torch
from transformers import Trainer

import lowpeak_trainers

METHODS = ("DPO", "KTO", "Reward", "Distillation", "GRPO", "RLOO")
BUDGET = 40
# Completions of the student, the same ones for every four prompts.
COMPLETIONS = [[7, 9, 11, 2], [13, 8, 2], [40, 41, 42, 43, 44, 2], [90, 2]]


class Call(NamedTuple):
    """A call of a backbone: whether for gradients, and the shape of its tokens."""

    gradients: bool
    shape: tuple[int, ...]

    @property
    def tokens(self) -> int:
        rows, width = self.shape
        return rows * width


def build(package: ModuleType, method: str, folder: Path, **options: Any) -> Trainer:
    """A trainer with 4 rows a batch and 2 batches a step; options go to its config."""
    model = options.pop("model", None)
    options = {"per_device_train_batch_size": 4, **options}
    if method == "Reward":
        return package.RewardTrainer(
            model=tiny.reward_model(),
            args=package.RewardConfig(**parity.settings(folder, **options)),
            train_dataset=tiny.preferences(methods.PAIRS),
            eval_dataset=tiny.preferences(methods.PAIRS[:6]),
            processing_class=tiny.tokenizer(),
        )
    if method == "Distillation":
        data = tiny.prompts(methods.LENGTHS)
        trainer = package.DistillationTrainer(
            model=tiny.llama() if model is None else model,
            teacher_model=tiny.llama(seed=2, hidden_size=48, initializer_range=0.15),
            args=package.DistillationConfig(
                **parity.settings(folder, max_completion_length=8, **options)
            ),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tiny.tokenizer(),
        )
        script(trainer)
        return trainer
    if method == "RLOO":
        options = {"beta": 0.0, **options}
    keywords = {}
    if method in methods.REFERENCED:
        keywords["eval_dataset"] = methods.keywords_of(method)["train_dataset"].select(range(8))
    return methods.build(package, method, folder, model=model, options=options, **keywords)


def script(trainer: Trainer) -> None:
    """Let the student "generate" COMPLETIONS."""
    width = max(map(len, COMPLETIONS))
    rows = torch.tensor([[*ids, *[tiny.PAD] * (width - len(ids))] for ids in COMPLETIONS])

    @functools.wraps(trainer.model.generate)
    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        repeated = rows.repeat(-(-len(input_ids) // len(rows)), 1)[: len(input_ids)]
        return torch.cat([input_ids, repeated.to(input_ids.device)], dim=1)

    trainer.model.generate = generate


def watch(trainer: Trainer) -> list[Call]:
    """Calls of the backbone of the trainer's model and of its reference from now on."""
    calls: list[Call] = []

    def note(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        calls.append(Call(torch.is_grad_enabled(), tuple(output.shape[:-1])))

    for name in ("model", "ref_model"):
        model = vars(trainer).get(name)
        if model is not None:
            trainer.accelerator.unwrap_model(model).get_input_embeddings().register_forward_hook(
                note
            )
    return calls


def numbers(trainer: Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, also those before a resume."""
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


def assert_follows(package: ModuleType, method: str, folder: Path, **options: Any) -> list[Call]:
    """Five steps within BUDGET log what `package` logs by row counts; returns the calls."""
    budget = options.pop("max_tokens_per_batch", BUDGET)
    ours_only = {
        name: options.pop(name) for name in ("padding_free", "share_prompts") if name in options
    }
    model = options.pop("model", lambda: None)

    def ours() -> Trainer:
        trainer = build(
            lowpeak_trainers,
            method,
            folder,
            model=model(),
            max_tokens_per_batch=budget,
            **ours_only,
            **options,
        )
        trainer.watched = watch(trainer)
        return trainer

    stock, trained = parity.train_both(
        lambda: build(package, method, folder, model=model(), **options),
        ours,
        online=method in methods.ONLINE,
    )
    parity.assert_same_logs(trained, stock)
    return trained.watched
