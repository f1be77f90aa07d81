"""Peak bytes of a training step: no route holds the logits of the batch."""

import pytest
import tiny_models
import torch
from test_self_test import PerTokenFactor
from tiny_models import tiny_model
from transformers import LlamaConfig, PreTrainedModel

from lowpeak import MemoryConfig, reduce_memory
from lowpeak.memory import track_memory

TOKENS = 512


def wide_model(kind: str, vocabulary: int) -> PreTrainedModel:
    if kind == "fused":
        return tiny_model("llama", vocab_size=vocabulary)
    config = LlamaConfig(**{**tiny_model("llama").config.to_dict(), "vocab_size": vocabulary})
    return PerTokenFactor(config).to(tiny_models.DEVICE)


def peak_of_a_step(model: PreTrainedModel, ids: torch.Tensor) -> int:
    with track_memory(ids.device) as report:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return report.peak_bytes - report.start_bytes


def assert_step_holds_a_fraction_of_the_logits(kind: str, vocabulary: int) -> None:
    logits = 4 * vocabulary * TOKENS
    model = wide_model(kind, vocabulary).train()
    ids = torch.randint(3, 120, (1, TOKENS), device=model.device)
    own = peak_of_a_step(model, ids)
    assert own > 2 * logits
    reduce_memory(model, MemoryConfig(lm_head_scratch_bytes=logits // 8))
    peak_of_a_step(model, ids)  # the self-test, and what libraries keep from their first call on
    # The gradients of embedding and head are an eighth of the logits.
    assert peak_of_a_step(model, ids) < logits / 2


@pytest.mark.parametrize("kind", ["fused", "tile by tile"])
def test_step_holds_a_fraction_of_the_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU also where there is a GPU: its attention makes no [512, 512] tensors."""
    monkeypatch.setattr(tiny_models, "DEVICE", torch.device("cpu"))
    assert_step_holds_a_fraction_of_the_logits(kind, 8009)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["fused", "tile by tile"])
def test_step_holds_a_fraction_of_the_logits_on_a_gpu(kind: str) -> None:
    """Logits of 256 MiB beside some 20 MiB of attention weights in float32."""
    assert_step_holds_a_fraction_of_the_logits(kind, 131_009)
