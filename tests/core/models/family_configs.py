"""A tiny configuration of any causal language model, made from its class and the names of fields.

A field keeps its default unless its name says that it is a size: then it is the lesser of its
default and the size below. What depends on other sizes by a rule of the family is in `OVERRIDES`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

VOCABULARY = 131
# Ids that stand for images and the like: no id of a text batch is one of them.
FIRST_SPECIAL_ID = 121

_NAMES_BY_SIZE: dict[int, str] = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    127: "unpadded_vocab_size",
    64: (
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
        "max_source_positions original_max_position_embeddings model_max_length "
        "log_scaling_n_floor floor_scale attention_chunk_size "
        "ngram_vocab_size_base encoder_hash_byte_group_vocab "
        "pronunciation_vocab_size shape_vocab_size position_bias_num_buckets codebook_size"
    ),
    48: (
        "intermediate_size moe_intermediate_size ffn_dim ffn_hidden_size dff dim_ff d_ff "
        "decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp dense_intermediate_size d_inner "
        "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size moe_shared_expert_intermediate_size feed_forward_size mlp_dim "
        "prompt_mid_dim"
    ),
    32: (
        "hidden_size d_model n_embd emb_dim embedding_dim lru_width word_embed_proj_dim "
        "attention_hidden_size hidden_size_global backbone_hidden_size input_size "
        "mamba_d_ssm embedding_size input_embedding_size out_hidden_size ext_pw_out_channel "
        "nemo_conv_channels depthwise_separable_out_channel mm_embed_dim mm_posemb_size "
        "vector_quantization_hidden_dimension output_channels num_centroids"
    ),
    16: (
        "sliding_window window_size attention_window_size local_attention sliding_window_size "
        "local_attention_window_len keep_window_size rel_extent index_topk block_size "
        "output_embedding_size index_head_dim index_block_size ple_embed_dim router_hidden_size "
        "lsh_attn_chunk_length local_attn_chunk_length pronunciation_embed_dim shape_embed_dim "
        "mem_len num_position_embeddings num_mel_bins audio_vocab_size hidden_size_per_layer_input"
    ),
    8: (
        "head_dim dim_head d_head q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim qk_head_dim o_lora_rank swa_head_dim linear_head_dim linear_key_head_dim "
        "linear_value_head_dim state_size ssm_state_size mamba_d_state mamba_d_head mamba_head_dim "
        "mamba_chunk_size chunk_size mamba_dt_rank time_step_rank laurel_rank hc_lowrank "
        "loop_gate_rank gated_norm_rank adapter_rank kv_channels attention_head_size image_size "
        "index_topk_blocks prompt_length max_num_tiles d_rel codebook_dim mm_tokens_per_image "
        "rotary_dim conf_num_attention_heads split_ngram_parts make_ngram_vocab_size_divisible_by"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "num_experts num_local_experts n_routed_experts moe_num_experts n_mamba_heads "
        "mamba_n_heads mamba_num_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads index_n_heads patch_size query_pre_attn_scalar heads_per_ngram"
    ),
    2: (
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num "
        "num_query_groups mamba_ngroups n_groups decoder_sparse_step layer_group_size "
        "num_codebooks num_quantizers num_blocks depth conf_num_hidden_layers "
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers num_layers_per_stack"
    ),
    1: (
        "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers "
        "moe_layer_end_index num_nextn_predict_layers o_groups num_global_layers"
    ),
    0: "num_kv_shared_layers max_window_layers",
}
SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
_NO_DROPOUT = ("dropout", "pdrop", "dropout_prob", "dropout_p", "dropout_rate", "layerdrop")

# Configuration class: fields that a rule of the family ties together.
_FOUR_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_TWO_HYBRID_LAYERS = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
}
# The halves of a head of 8 among time, height and width.
_ROTARY_OF_IMAGES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOP_2 = {"num_experts_per_tok": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _ROTARY_OF_IMAGES}},
    "DeepseekV2Config": _TOP_2,
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "Dots1Config": {**_FOUR_EXPERTS, "n_shared_experts": 1},
    "Dots3NoteVisionConfig": {
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
        "mlp_layer_types": ["dense", "dense"],
        **_TOP_2,
    },
    "Dots3NoteAudioConfig": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "sliding_window": 16,
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma4AssistantConfig": {
        "text_config": {
            "model_type": "gemma4_text",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 16},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "Glm4vTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "GlmOcrTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "PaddleOCRTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "Glm4vMoeTextConfig": {"rope_parameters": {**_ROTARY_OF_IMAGES, "partial_rotary_factor": 1.0}},
    "Inkling2VisionConfig": {"text_hidden_size": 32},
    "Inkling2LoopVisionConfig": {"text_hidden_size": 32},
    "Qwen2VLTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _ROTARY_OF_IMAGES},
    "Qwen2VLVisionConfig": {"embed_dim": 32},
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": _TWO_HYBRID_LAYERS,
    "Zamba2Config": _TWO_HYBRID_LAYERS,
}


def tiny_config(config_class: type[PreTrainedConfig], **overrides: Any) -> PreTrainedConfig:
    """A configuration of two layers 32 wide over 131 tokens; those inside it are shrunk alike."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = _tiny_value(field.name, field.default)
        if value is not None:
            arguments[field.name] = value
    arguments |= _head_counts(config_class) | _special_ids(config_class)
    fixed = {**OVERRIDES.get(config_class.__name__, {}), **overrides}
    for name, inner in _inner_classes(config_class, set(fixed)).items():
        arguments[name] = tiny_config(inner)
    arguments |= _one_layer_of_each_type(config_class, set(fixed))
    return config_class(**{**arguments, **fixed})


def _tiny_value(name: str, default: Any) -> Any:
    """The value of a field in a tiny configuration; None to leave it out."""
    if isinstance(default, bool):
        return True if name == "is_decoder" else None
    if not isinstance(default, int | float):
        return None
    if name.endswith(_NO_DROPOUT):
        return type(default)(0)
    return min(default, SIZES[name]) if name in SIZES else None


def _head_counts(config_class: type[PreTrainedConfig]) -> dict[str, int]:
    """Fields of the heads that follow from each other."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    counts = {}
    if "head_dim" in defaults:
        counts["head_dim"] = SIZES["head_dim"]
    heads = defaults.get("num_attention_heads")
    if isinstance(heads, int) and defaults.get("num_key_value_heads") == heads:
        counts["num_key_value_heads"] = SIZES["num_attention_heads"]
    return counts


def _special_ids(config_class: type[PreTrainedConfig]) -> dict[str, int]:
    """Ids outside the vocabulary get one in it: distinct, and none that a text batch holds."""
    names = [
        field.name
        for field in dataclasses.fields(config_class)
        if field.name.endswith(("_token_id", "_token_index"))
        and isinstance(field.default, int)
        and field.default >= FIRST_SPECIAL_ID
    ]
    text = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    others = [name for name in names if name not in text]
    ids = dict(zip(others, range(VOCABULARY - 1, FIRST_SPECIAL_ID - 1, -1), strict=False))
    return {**{name: text[name] for name in names if name in text}, **ids}


def _one_layer_of_each_type(
    config_class: type[PreTrainedConfig], fixed: set[str]
) -> dict[str, Any]:
    """For families that mix kinds of layers: their first two are often of one kind."""
    names = {field.name for field in dataclasses.fields(config_class)}
    if "layer_types" not in names or "num_hidden_layers" not in names or fixed & {"layer_types"}:
        return {}
    types = list(dict.fromkeys(config_class().layer_types or ()))
    if len(types) < 2:
        return {}
    return {"layer_types": types, "num_hidden_layers": len(types)}


def _inner_classes(
    config_class: type[PreTrainedConfig], fixed: set[str]
) -> dict[str, type[PreTrainedConfig]]:
    inner = {n: value for n, value in config_class.sub_configs.items() if n not in fixed}
    if any(value is AutoConfig for value in inner.values()):
        default = config_class()
        inner = {
            name: type(getattr(default, name)) if value is AutoConfig else value
            for name, value in inner.items()
        }
    return {name: value for name, value in inner.items() if value is not type(None)}
