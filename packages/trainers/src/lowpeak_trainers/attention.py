"""The attention of a trainer's models, where its user named none."""

from __future__ import annotations

import logging
from typing import Any

from lowpeak.attention import AttentionChoice, register_attention, use_attention
from lowpeak.config import MemoryConfig, why_attention_is_off

logger = logging.getLogger("lowpeak.trainers")

# Names that TRL loads models by are resolved by transformers: it must know "lowpeak" by then.
register_attention()


def choose_trainer_attention(trainer: Any, config: MemoryConfig) -> AttentionChoice:
    """Give the model that `trainer` trains, and its reference model, the attention they can have.

    `config.attention` decides, then what `model_init_kwargs` names, then `choose_attention`. Warns
    where rows are packed and the attention lets their documents see each other. Returns what the
    trained model has now.
    """
    name, off = config.attention, why_attention_is_off(config)
    if off is None and name is None and _named_by_user(trainer.args):
        off = "model_init_kwargs, which names one"
    if off is not None:
        logger.info("attention: left as it is in %s, by %s", type(trainer).__name__, off)
        current = trainer.accelerator.unwrap_model(trainer.model).config._attn_implementation
        return AttentionChoice(current, f"{off} left it so", True)
    choice = use_attention(trainer.accelerator.unwrap_model(trainer.model), name).choice
    reference = vars(trainer).get("ref_model")
    if reference is not None:
        use_attention(trainer.accelerator.unwrap_model(reference), name)
    if not choice.separates_documents and vars(trainer).get("padding_free"):
        logger.warning(
            "the documents of a packed row may see each other in %s: %s. Train without packing and "
            "padding_free",
            type(trainer).__name__,
            choice.reason,
        )
    return choice


def _named_by_user(args: Any) -> bool:
    given = vars(args).get("model_init_kwargs")
    return isinstance(given, dict) and given.get("attn_implementation") is not None
