"""OnlineDPO of a vision-language model: the pictures reach the fused forward."""

from __future__ import annotations

import recipes
import tiny
import tiny_vision
import torch


def log_probs(package, folder, flip=False):
    """Of two completions, behind prompts with a picture each."""
    processor = tiny_vision.processor()
    trainer = recipes.build(
        package,
        "OnlineDPO",
        folder,
        model=tiny_vision.llava(),
        further={"processing_class": processor},
    )
    prompts = processor(
        text=[f"<image> {tiny.words(tiny.random_ids(n, n))}" for n in (3, 6)],
        images=[[tiny_vision.picture(row)] for row in range(2)],
        return_tensors="pt",
        padding=True,
        padding_side="left",
    ).to(trainer.model.device)
    completions = torch.tensor([tiny.random_ids(5, seed) for seed in (1, 2)])
    completions = completions.to(trainer.model.device)
    pixels = prompts["pixel_values"]
    return trainer._forward(
        trainer.model,
        prompts["input_ids"],
        prompts["attention_mask"],
        completions,
        torch.ones_like(completions),
        {"pixel_values": pixels.flip(-1) if flip else pixels},
    )


def test_log_probs_are_those_of_trl(tmp_path):
    wanted, found = (log_probs(package, tmp_path) for package in ("trl", "lowpeak_trainers"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    other = log_probs("lowpeak_trainers", tmp_path, flip=True)
    assert (other - found).abs().max() > 1e-3
