"""Which models get "lowpeak" attention: by inspection, by the self-test, by their user's word."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from attention_oracle import alone, assert_near, documents, packed_row, tiny
from family_configs import tiny_config
from transformers import PreTrainedModel

from lowpeak import MemoryConfig, reduce_memory
from lowpeak.attention import choose_attention, use_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what odd constructors say
    # peft asks by the name that transformers 5.24 deprecates
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def build(class_name: str, config_name: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model of any family."""
    torch.manual_seed(0)
    config = tiny_config(getattr(transformers, config_name), **overrides)
    model: PreTrainedModel = getattr(transformers, class_name)(config)
    return model


# Family: class, configuration, what is set, the reason given
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "sinks": ("GptOssForCausalLM", "GptOssConfig", {}, "has sinks"),
    "soft cap": ("Gemma2ForCausalLM", "Gemma2Config", {"attn_logit_softcapping": 50.0}, "soft cap"),
    "chunks": ("Llama4ForCausalLM", "Llama4TextConfig", {}, "attention is chunked"),
    "wide heads": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": 264}, "head_dim=264"),
    "dropout": ("GPT2LMHeadModel", "GPT2Config", {"attn_pdrop": 0.1}, "attn_pdrop=0.1"),
    "linear layers": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {}, "type linear_attention"),
    "convolutions": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"]},
        "type conv",
    ),
    "recurrence": ("MambaForCausalLM", "MambaConfig", {}, "type linear_attention"),
    "own layers": ("FalconForCausalLM", "FalconConfig", {}, "AttentionInterface"),
    "own positions": ("OPTForCausalLM", "OPTConfig", {}, "changes by"),
    "rotary of the row": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "longest document of the row",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_reason(what: str) -> None:
    class_name, config_name, overrides, reason = REFUSED[what]
    model = build(class_name, config_name, **overrides)
    before = model.config._attn_implementation
    choice = choose_attention(model)
    assert choice.name == before == model.config._attn_implementation
    assert reason in choice.reason
    with pytest.raises(ValueError, match=f"does not serve {class_name}: "):
        use_attention(model, "lowpeak")
    assert model.config._attn_implementation == before


def test_images_are_refused() -> None:
    model = build("Gemma3ForConditionalGeneration", "Gemma3Config")
    choice = choose_attention(model)
    assert choice.name == "sdpa"
    assert "more than text" in choice.reason


@pytest.mark.parametrize("name", ["llama", "mistral_window_4", "gemma3_window_4", "mixtral"])
def test_chosen_where_the_user_named_none(name: str, device: torch.device) -> None:
    model = tiny(name, "sdpa", device)
    choice = choose_attention(model)
    assert (choice.name, choice.separates_documents) == ("lowpeak", True)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chosen_in_low_precision(dtype: torch.dtype, device: torch.device) -> None:
    assert choose_attention(tiny("llama", "sdpa", device).to(dtype)).name == "lowpeak"


def test_choice_of_the_user_stays(device: torch.device) -> None:
    for name in ("eager", "flex_attention"):
        choice = choose_attention(tiny("llama", name, device))
        assert (choice.name, choice.separates_documents) == (name, True)


def test_the_self_test_leaves_no_trace(device: torch.device) -> None:
    model = tiny("gemma3_window_4", "sdpa", device).train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_attention(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_leak_is_found_in_every_dtype(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # sdpa's own causal kernel in place of ours is what a model without boundaries does
    monkeypatch.setattr("lowpeak.attention.forward._boundaries", lambda *args: None)
    monkeypatch.setattr("lowpeak.attention.pattern.read_mask_function", lambda function: None)
    model = tiny("llama", "sdpa", device)
    layer = model.model.forward

    def without_positions(**arguments: Any) -> Any:
        arguments.pop("position_ids", None)
        return layer(**arguments)

    model.model.forward = without_positions
    for dtype in (torch.float32, torch.bfloat16):
        choice = choose_attention(model.to(dtype))
        assert choice.name == "sdpa"
        assert "changes by" in choice.reason
        assert not choice.separates_documents


def test_weights_elsewhere_are_judged_by_inspection() -> None:
    with torch.device("meta"):
        model = build("LlamaForCausalLM", "LlamaConfig")
        untested = build("OPTForCausalLM", "OPTConfig")
    assert choose_attention(model).name == "lowpeak"
    untested.__class__._supports_flash_attn, before = False, untested._supports_flash_attn
    try:
        choice = choose_attention(untested)
    finally:
        untested.__class__._supports_flash_attn = before
    assert (choice.name, choice.separates_documents) == ("sdpa", False)
    assert "weights are elsewhere" in choice.reason


def test_reduce_memory_switches_and_remove_restores(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lowpeak")
    model = tiny("gemma3_window_4", "sdpa", device)
    handle = reduce_memory(model)
    assert model.config._attn_implementation == "lowpeak"
    assert "Gemma3ForCausalLM: attention lowpeak: packed documents" in caplog.text
    parts = documents([7, 5, 9], device)
    packed = model(**packed_row(parts)).logits
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert_near(packed, alone(model, parts), 1e-5)
    model.set_attn_implementation("eager")
    handle.remove()
    assert model.config._attn_implementation == "eager"


def test_remove_keeps_what_was_set_since(device: torch.device) -> None:
    model = tiny("llama", "sdpa", device)
    handle = use_attention(model)
    model.set_attn_implementation("eager")
    handle.remove()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_switched_off(
    by: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lowpeak")
    if by == "environment":
        monkeypatch.setenv("LOWPEAK_DISABLE", "attention")
    model = tiny("llama", "sdpa", device)
    reduce_memory(model, MemoryConfig(attention="off" if by == "flag" else None))
    assert model.config._attn_implementation == "sdpa"
    cause = "attention='off'" if by == "flag" else "LOWPEAK_DISABLE=attention"
    assert f"attention left as it is, by {cause}" in caplog.text


def test_named_attention_is_given(device: torch.device) -> None:
    model = tiny("llama", "sdpa", device)
    handle = reduce_memory(model, MemoryConfig(attention="eager"))
    assert model.config._attn_implementation == "eager"
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="attention=False is no name"):
        MemoryConfig(attention=False).validate_memory_config()  # type: ignore[arg-type]


def test_adapters(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    base = tiny("gemma3_window_4", "sdpa", device)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    parts = documents([7, 5, 9], device)
    wanted = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], dim=1)
    use_attention(model)
    assert base.config._attn_implementation == "lowpeak"
    assert_near(model(**packed_row(parts)).logits, wanted, 1e-5)
