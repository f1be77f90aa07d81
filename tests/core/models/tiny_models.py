"""Tiny random causal language models of many families, built from their configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# Not a multiple of any tile of the fused head.
VOCABULARY = 131
# Where models and batches are made; conftest.py sets it.
DEVICE = torch.device("cpu")

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_EXPERTS: dict[str, Any] = {
    **_DECODER,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}
_NO_ATTENTION_DROPOUT: dict[str, Any] = {"attention_probs_dropout_prob": 0.0}
_INKLING: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

# family: (class, configuration class, its arguments)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": True}),
    "llama4_text": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_DECODER,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DECODER, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_DECODER, "logit_scale": 0.0625}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_DECODER, "logits_scaling": 8.0}),
    "hyperclovax": (
        "HyperCLOVAXForCausalLM",
        "HyperCLOVAXConfig",
        {**_DECODER, "logits_scaling": 0.25},
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**_DECODER, **_MAMBA, "lm_head_multiplier": 0.0625},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": 4}),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
            "n_positions": 64,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
            "dropout": 0.0,
        },
    ),
    "bart_decoder": (
        "BartForCausalLM",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "is_decoder": True,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_DECODER, "hidden_dropout": 0.0}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**_DECODER, "logits_soft_cap": 30.0, "lru_width": 32, "attention_window_size": 16},
    ),
    "xlstm": (
        "xLSTMForCausalLM",
        "xLSTMConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4},
    ),
    "modernbert_decoder": (
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        {**_DECODER, "sliding_window": 16},
    ),
    "bert": (
        "BertLMHeadModel",
        "BertConfig",
        {**_DECODER, "is_decoder": True, "hidden_dropout_prob": 0.0, **_NO_ATTENTION_DROPOUT},
    ),
    "electra": (  # its head takes 128 features, its backbone makes 32
        "ElectraForCausalLM",
        "ElectraConfig",
        {**_DECODER, "is_decoder": True, "hidden_dropout_prob": 0.0, **_NO_ATTENTION_DROPOUT},
    ),
    "inkling": (
        "InklingForCausalLM",
        "InklingTextConfig",
        {**_DECODER, **_INKLING, "logits_mup_width_multiplier": 4.0},
    ),
    "nanochat": ("NanoChatForCausalLM", "NanoChatConfig", _DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_EXPERTS, "sliding_window": 16}),
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def is_known(family: str) -> bool:
    """Whether the installed transformers has the family."""
    return hasattr(transformers, FAMILIES[family][0])


def tiny_model(family: str, *, head_scale: float = 40.0, **overrides: Any) -> PreTrainedModel:
    """A model with the head's weights times `head_scale`, so that mistakes in the logits show."""
    class_name, config_name, arguments = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**arguments, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(head_scale)
        if head.bias is not None:
            head.bias.normal_()
    return model.to(DEVICE)


def tiny_gemma3_with_vision() -> PreTrainedModel:
    """A vision language model; its backbone is `model`, its text config holds the soft cap."""
    config = transformers.Gemma3Config(
        text_config={**_DECODER, "final_logit_softcapping": 30.0, "sliding_window": 16},
        vision_config={**_VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=1,
        image_token_index=130,
        boi_token_index=129,
        eoi_token_index=128,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    return model.to(DEVICE)


def token_batch(rows: int = 2, length: int = 12, *, ignored: int = 4) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask and labels [rows, length]; the first `ignored` labels are -100."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :ignored] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: value.to(DEVICE) for name, value in batch.items()}
