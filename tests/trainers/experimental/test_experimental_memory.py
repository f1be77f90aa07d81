"""Peak bytes of a training step on the CPU, by the allocator's events: no logits of the batch."""

from __future__ import annotations

import pytest
import recipes
import tiny
import torch

from lowpeak.memory import track_memory

TOKENS = 512
VOCABULARY = 8009


def model(**overrides):
    return tiny.llama(
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, num_hidden_layers=1, **overrides
    )


def batch_of(method):
    """Two rows of TOKENS tokens, whose second half is scored."""
    ids = torch.randint(3, 120, (2, TOKENS))
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : TOKENS // 2] = -100
    if method == "GKD":
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if method == "TPO":
        completions = (labels != -100).long()
        return {"input_ids": ids, "attention_mask": mask, "completion_mask": completions}
    batch = {}
    for row, name in enumerate(("chosen", "rejected")):
        batch[f"{name}_input_ids"] = ids[row : row + 1]
        batch[f"{name}_attention_mask"] = mask[row : row + 1]
        batch[f"{name}_labels"] = labels[row : row + 1]
    return batch


def peak_of_a_step(trainer, batch):
    with track_memory("cpu") as report:
        trainer.compute_loss(trainer.model, dict(batch)).backward()
    trainer.model.zero_grad()
    return report.peak_bytes


@pytest.mark.parametrize("method", ["ORPO", "CPO", "GKD", "TPO"])
def test_step_holds_a_fraction_of_the_logits(method, tmp_path):
    logits = 2 * TOKENS * VOCABULARY * 4
    options = {"use_cpu": True, "gradient_checkpointing": False}
    if method == "TPO":
        options["tpo_alpha"] = 0.0  # a batch of two rows
    peaks = {}
    for package in ("trl", "lowpeak_trainers"):
        if package == "lowpeak_trainers":
            options["lm_head_scratch_bytes"] = logits // 8
        trainer = recipes.build(
            package,
            method,
            tmp_path,
            model=model(),
            further={"teacher_model": model(seed=1)} if method == "GKD" else None,
            **options,
        )
        batch = batch_of(method)
        peak_of_a_step(trainer, batch)  # the self-test, and what libraries keep
        peaks[package] = peak_of_a_step(trainer, batch)
    assert peaks["trl"] > 2 * logits
    # The gradients of embedding and head are a sixteenth of the logits.
    assert peaks["lowpeak_trainers"] < logits / 2
