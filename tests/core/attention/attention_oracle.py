"""Right answers: every document alone, dense scores, float64. And tiny models to ask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCABULARY = 131
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that a wrong neighbour shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

# Name: (class, configuration class, its arguments)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral_window_4": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    "gemma3_window_4": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 8, "query_pre_attn_scalar": 8, **_SLIDING_THEN_FULL},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3_window_4": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, **_SLIDING_THEN_FULL},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"num_key_value_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
    ),
}


def tiny(name: str, attention: str, device: torch.device, **overrides: Any) -> PreTrainedModel:
    """A model of MODELS, its weights the same at every call."""
    class_name, config_name, arguments = MODELS[name]
    config = getattr(transformers, config_name)(**{**_DECODER, **arguments, **overrides})
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, class_name)(config)
    model.set_attn_implementation(attention)
    return model.to(device)


def twin(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A copy with another attention."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(attention)
    return copied


def documents(lengths: Sequence[int], device: torch.device, seed: int = 1) -> list[Tensor]:
    """Ids [1, n] of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (1, n), generator=generator).to(device) for n in lengths]


def packed_row(parts: Sequence[Tensor], *, marks: bool = True) -> dict[str, Any]:
    """One row of all documents as TRL's collator makes it; without marks, as stock transformers."""
    device = parts[0].device
    lengths = [ids.size(1) for ids in parts]
    row: dict[str, Any] = {
        "input_ids": torch.cat(list(parts), dim=1),
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "use_cache": False,
    }
    if marks:
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        row |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        row |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return row


def alone(model: PreTrainedModel, parts: Sequence[Tensor]) -> Tensor:
    """Logits [1, T, V] of the documents, each in a call of its own."""
    return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], dim=1)


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Gradients by parameter name; a parameter that gets none is left out."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weighted(logits: Tensor) -> Tensor:
    """A scalar in which every logit has a weight of its own."""
    weights = torch.sin(torch.arange(logits.numel(), device=logits.device, dtype=logits.dtype))
    return (logits.flatten() * weights).sum()


def assert_near(found: Tensor, wanted: Tensor, tolerance: float, floor: float = 1e-6) -> None:
    """The largest error is within `tolerance` of the largest element wanted, or of `floor`."""
    assert found.shape == wanted.shape
    error = (found.double() - wanted.double()).abs().max().item()
    scale = max(wanted.double().abs().max().item(), floor)
    assert error <= tolerance * scale, f"off by {error}, largest is {scale}"


def assert_same_gradients(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float
) -> None:
    """Same parameters, each within `tolerance` of the largest gradient of all."""
    assert found.keys() == wanted.keys()
    scale = max(g.double().abs().max().item() for g in wanted.values())
    for name, gradient in wanted.items():
        error = (found[name].double() - gradient.double()).abs().max().item()
        assert error <= tolerance * scale, f"{name} is off by {error}, scale {scale}"


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    window: int | None,
    scale: float,
) -> Tensor:
    """What `blockwise_attention` is to return, from scores of tokens by tokens."""
    groups = query.size(1) // key.size(1)
    outputs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        position = torch.arange(len(q), device=q.device)
        behind = position.unsqueeze(1) - position
        hidden = (behind < 0) | (behind >= (window or len(q)))
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", probs, v))
    return torch.cat(outputs)
