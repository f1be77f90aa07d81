"""GRPO's completions: sampled on both sides, trained on the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Completions = list[list[int]]


class RecordedRollouts:
    """A rollout function for `trl.GRPOTrainer` that samples, and records or compares.

    The first run writes what it sampled to `path`. A later run samples too, so that its time and
    memory are all there, and trains on the recorded completions: where rounding makes the weights
    differ in the last bits, one other token would make the losses incomparable.
    `differing_tokens` says for each step how many tokens were sampled otherwise (None: recorded).
    """

    def __init__(self, path: Path, completion_tokens: int, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._completion_tokens = completion_tokens
        self._recorded: list[Completions] | None = None
        if path.is_file():
            self._recorded = json.loads(path.read_text(encoding="utf-8"))
        self._sampled: list[Completions] = []
        self.differing_tokens: list[int | None] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return prompt and completion ids in the form TRL asks for."""
        prompt_ids, completions = self._sample(prompts, trainer)
        step = len(self._sampled)
        self._sampled.append(completions)
        if self._recorded is None:
            self._path.write_text(json.dumps(self._sampled), encoding="utf-8")
            self.differing_tokens.append(None)
        else:
            self.differing_tokens.append(count_differing(completions, self._recorded[step]))
            completions = self._recorded[step]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    def _sample(self, prompts: list[Any], trainer: Any) -> tuple[Completions, Completions]:
        tokenizer, model = trainer.processing_class, trainer.model
        batch = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
        accelerators = [] if model.device.type == "cpu" else [model.device]
        model.eval()  # gradient checkpointing, which rules out the key-value cache, is then off
        # Sampling has random numbers of its own: both sides begin each step with the same ones, and
        # leave the same ones to the trainer, however many tokens were sampled.
        with (
            torch.no_grad(),
            torch.random.fork_rng(accelerators, device_type=model.device.type),
        ):
            torch.manual_seed(self._seed + len(self._sampled))
            sequences = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self._completion_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        model.train()
        width = batch["input_ids"].shape[1]
        prompt_ids = [
            row[mask.bool()].tolist()
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        rows = sequences[:, width:].tolist()
        return prompt_ids, [until_end(row, tokenizer.eos_token_id) for row in rows]


def until_end(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to the first `end`, this one included."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def count_differing(mine: Completions, theirs: Completions) -> int:
    """Return the number of positions in which two lists of completions differ."""
    return sum(
        abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False))
        for a, b in zip(mine, theirs, strict=True)
    )
