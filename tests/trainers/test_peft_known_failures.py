"""Failures of adapters and frozen weights together with gradient checkpointing."""

from __future__ import annotations

import oracle
import parity
import pytest
import tiny
from peft import LoraConfig

import lowpeak_trainers


def gradients_of_one_step(folder, adapted, **options):
    """Gradients of one SFT step with LoRA, or with frozen input embeddings."""
    model = tiny.llama()
    if not adapted:
        model.get_input_embeddings().requires_grad_(False)
    record = oracle.GradientRecord()
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer = lowpeak_trainers.SFTTrainer(
        model=model,
        args=lowpeak_trainers.SFTConfig(
            **parity.settings(folder, max_steps=1, max_grad_norm=1e9, **options)
        ),
        train_dataset=tiny.documents([3, 30, 7, 12]),
        processing_class=tiny.tokenizer(),
        peft_config=lora if adapted else None,
        callbacks=[record],
    )
    trainer.train()
    return record.steps[0]


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "frozen_embeddings"])
def test_b6_checkpointing_keeps_every_gradient(adapted, tmp_path):
    plain = gradients_of_one_step(tmp_path, adapted, gradient_checkpointing=False)
    for use_reentrant in (True, False):
        checkpointed = gradients_of_one_step(
            tmp_path,
            adapted,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )
        oracle.assert_same_gradients(checkpointed, plain, tolerance=1e-6)
