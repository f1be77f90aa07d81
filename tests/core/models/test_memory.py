"""Peak bytes of a training step: no route holds the logits of the batch."""

import pytest
import torch
from test_self_test import PerTokenFactor
from tiny_models import tiny_model
from transformers import LlamaConfig, PreTrainedModel

from lowpeak import MemoryConfig, reduce_memory
from lowpeak.memory import track_memory

VOCABULARY, TOKENS = 8009, 512
LOGITS = 4 * VOCABULARY * TOKENS


def wide_model(kind: str) -> PreTrainedModel:
    if kind == "fused":
        return tiny_model("llama", vocab_size=VOCABULARY)
    config = LlamaConfig(**{**tiny_model("llama").config.to_dict(), "vocab_size": VOCABULARY})
    return PerTokenFactor(config)


def peak_of_a_step(model: PreTrainedModel, ids: torch.Tensor) -> int:
    with track_memory(ids.device) as report:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return report.peak_bytes - report.start_bytes


@pytest.mark.parametrize("kind", ["fused", "tile by tile"])
def test_step_holds_a_fraction_of_the_logits(kind: str) -> None:
    model = wide_model(kind).train()
    ids = torch.randint(3, 120, (1, TOKENS), device=model.device)
    own = peak_of_a_step(model, ids)
    assert own > 2 * LOGITS
    reduce_memory(model, MemoryConfig(lm_head_scratch_bytes=LOGITS // 8))
    model(input_ids=ids, labels=ids)  # the self-test
    # 1 MB is the gradient of the head
    assert peak_of_a_step(model, ids) < LOGITS / 2
