"""An attention that the user named is honoured, but not trusted with packed rows untested."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from attention_oracle import alone, assert_near, documents, packed_row, tiny
from family_configs import tiny_config
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from lowpeak import MemoryConfig, reduce_memory
from lowpeak.attention import choose_attention, current_attention, register_attention, use_attention
from lowpeak.attention.forward import lowpeak_attention
from lowpeak.attention.pattern import lowpeak_mask

FLASH = "made_up_flash"


@pytest.fixture(autouse=True)
def _flash() -> Iterator[None]:
    """A flash attention that runs anywhere: lowpeak's under another name."""
    register_attention()
    AttentionInterface.register(FLASH, lowpeak_attention)
    AttentionMaskInterface.register(FLASH, lowpeak_mask)
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping[FLASH]


def family(name: str, config: str, device: torch.device, **overrides: Any) -> PreTrainedModel:
    """A tiny model with the made-up flash attention."""
    torch.manual_seed(0)
    settings = tiny_config(getattr(transformers, config), **overrides)
    model: PreTrainedModel = getattr(transformers, name)(settings)
    model.config._attn_implementation = FLASH
    return model.to(device)


# Mixers beside attention, or positions in the row, that no attention kernel can keep apart.
LEAKING: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "linear layers": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {}, "type linear_attention"),
    "convolutions": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"]},
        "type conv",
    ),
    "chunks": ("Llama4ForCausalLM", "Llama4TextConfig", {}, "attention is chunked"),
    "own positions": ("OPTForCausalLM", "OPTConfig", {}, "a document changes by"),
}


@pytest.mark.parametrize("what", LEAKING)
def test_hybrids_with_flash_are_refused(what: str, device: torch.device) -> None:
    name, config, overrides, reason = LEAKING[what]
    model = family(name, config, device, **overrides)
    choice = choose_attention(model)
    assert (choice.name, choice.separates_documents) == (FLASH, False)
    assert choice.reason.startswith(f"{FLASH!r} is what the model came with, but ")
    assert reason in choice.reason
    assert current_attention(model) == choice


def test_a_mixer_that_no_config_tells_of_is_found(device: torch.device) -> None:
    """A convolution beside a layer's MLP reaches over the end of a document."""
    model = family("LlamaForCausalLM", "LlamaConfig", device)
    assert choose_attention(model).separates_documents
    mix = torch.nn.Conv1d(model.config.hidden_size, model.config.hidden_size, 3, padding=2)
    mix.to(device)
    layer: Any = model.model.layers[0]
    own = layer.mlp.forward

    def mlp(hidden: torch.Tensor) -> torch.Tensor:
        mixed = mix(hidden.transpose(1, 2))[..., : hidden.size(1)].transpose(1, 2)
        return own(hidden) + mixed

    layer.mlp.forward = mlp
    choice = choose_attention(model)
    assert (choice.name, choice.separates_documents) == (FLASH, False)
    parts = documents([7, 5], device)
    packed = model(**packed_row(parts)).logits
    with pytest.raises(AssertionError):  # rightly so
        assert_near(packed, alone(model, parts), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_that_separates_is_kept(dtype: torch.dtype, device: torch.device) -> None:
    model = family("LlamaForCausalLM", "LlamaConfig", device).to(dtype)
    for choice in (choose_attention(model), use_attention(model, FLASH).choice):
        assert (choice.name, choice.separates_documents) == (FLASH, True)


def test_weights_elsewhere_are_judged_by_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = family("LlamaForCausalLM", "LlamaConfig", torch.device("meta"))
    assert current_attention(model).separates_documents
    # what transformers says of recurrent models, whatever their config tells of layers
    monkeypatch.setattr(type(model), "_is_stateful", True)
    choice = current_attention(model)
    assert not choice.separates_documents
    assert "cannot be tested here" in choice.reason


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_asked_for_and_leaking(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lowpeak")
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(tiny_config(transformers.OPTConfig)).to(device)
    reduce_memory(model, MemoryConfig(attention=name))
    assert model.config._attn_implementation == name
    assert "it was asked for, but a document changes by" in caplog.text


def test_lowpeak_that_the_model_came_with_is_tested_too(device: torch.device) -> None:
    model = tiny("llama", "lowpeak", device)
    assert current_attention(model).separates_documents
    hybrid = family("Qwen3NextForCausalLM", "Qwen3NextConfig", device)
    hybrid.config._attn_implementation = "lowpeak"
    assert not current_attention(hybrid).separates_documents
