"""The attention of a trainer's models, where its user named none."""

from __future__ import annotations

import logging
from typing import Any

from lowpeak.attention import (
    AttentionChoice,
    current_attention,
    register_attention,
    use_attention,
)
from lowpeak.config import MemoryConfig, why_attention_is_off
from lowpeak.pretrained import pretrained_model

logger = logging.getLogger("lowpeak.trainers")

# Names that TRL loads models by are resolved by transformers: it must know "lowpeak" by then.
register_attention()


def choose_trainer_attention(trainer: Any, config: MemoryConfig) -> AttentionChoice:
    """Give the model that `trainer` trains, and its reference model, the attention they can have.

    `config.attention` decides, then what `model_init_kwargs` names, then `choose_attention`.
    Returns what the trained model has now.
    """
    off = _why_off(config, trainer.args, "model_init_kwargs")
    choice = _choose(trainer, trainer.model, type(trainer).__name__, config.attention, off)
    reference = vars(trainer).get("ref_model")
    if reference is not None and off is None:
        use_attention(trainer.accelerator.unwrap_model(reference), config.attention)
    return choice


def reference_attention(trainer: Any) -> AttentionChoice | None:
    """The attention that the reference model of `trainer` has; None without such a model."""
    reference = vars(trainer).get("ref_model")
    if reference is None:
        return None
    return current_attention(pretrained_model(trainer.accelerator.unwrap_model(reference)))


def choose_teacher_attention(trainer: Any, config: MemoryConfig) -> AttentionChoice:
    """Give the teacher of `trainer` the attention that it can have, and return it.

    As for the model that is trained, but for attention="lowpeak": a teacher that this does not
    serve keeps what it has.
    """
    off = _why_off(config, trainer.args, "teacher_model_init_kwargs")
    name = None if config.attention == "lowpeak" else config.attention
    owner = f"the teacher of {type(trainer).__name__}"
    return _choose(trainer, trainer.teacher_model, owner, name, off)


def _choose(
    trainer: Any, wrapped: Any, owner: str, name: str | None, off: str | None
) -> AttentionChoice:
    model = trainer.accelerator.unwrap_model(wrapped)
    if off is None:
        return use_attention(model, name).choice
    logger.info("attention: left as it is in %s, by %s", owner, off)
    return current_attention(pretrained_model(model))


def _why_off(config: MemoryConfig, args: Any, keywords: str) -> str | None:
    off = why_attention_is_off(config)
    if off is None and config.attention is None:
        given = vars(args).get(keywords)
        if isinstance(given, dict) and given.get("attn_implementation") is not None:
            return f"{keywords}, which names one"
    return off
