"""What keeps a model from packed rows and from "lowpeak" attention, read off its config."""

from __future__ import annotations

from typing import Any

from .kernels import LARGEST_HEAD_DIM

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Where configurations keep what "lowpeak" attention has not; all of these are off when falsy.
_REFUSED = {
    "attn_logit_softcapping": "its attention has a soft cap on the scores",
    "attention_chunk_size": "its attention is chunked",
    "attn_temperature_tuning": "its attention is scaled by position in the row",
    "use_bidirectional_attention": "its attention looks ahead",
}
# These depend on places in the row, whatever the attention.
_OF_THE_ROW = ("attention_chunk_size", "attn_temperature_tuning")
_ROPE_OF_THE_ROW = {"dynamic", "longrope"}
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def config_reason(model: Any) -> str | None:
    """Why the config of `model` (a `PreTrainedModel`) rules "lowpeak" attention out, or None."""
    config = model.config
    if config.get_text_config() is not config:
        return "it takes more than text, and images may be seen in both directions"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    for name, reason in _REFUSED.items():
        if getattr(config, name, None):
            return f"{reason} ({name}={getattr(config, name)})"
    if (layers := _layer_reason(config)) is not None:
        return layers
    for name in _DROPOUT_NAMES:
        if isinstance(rate := getattr(config, name, None), int | float) and rate > 0:
            return f"its attention has dropout ({name}={rate})"
    widths = {name: n for name, n in config.to_dict().items() if name.endswith("head_dim")}
    for name, width in widths.items():
        if isinstance(width, int) and width > LARGEST_HEAD_DIM:
            return f"heads of more than {LARGEST_HEAD_DIM} features have no kernel ({name}={width})"
    return _rope_reason(config)


def model_reason(model: Any) -> str | None:
    """Why no attention can keep documents of a packed row of `model` apart; None if one may."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    for name in _OF_THE_ROW:
        if getattr(config, name, None):
            return f"{_REFUSED[name]} ({name}={getattr(config, name)})"
    return _layer_reason(config) or _rope_reason(config)


def _layer_reason(config: Any) -> str | None:
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        return f"it has layers of the type {', '.join(others)}, which may reach across documents"
    return None


def _rope_reason(config: Any) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One dictionary, or one for each type of layer.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if (kind := rope.get("rope_type")) in _ROPE_OF_THE_ROW:
            return f"its rotary embedding ({kind}) depends on the longest document of the row"
    return None
