"""Which attention a model trains with when its user named none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lowpeak.pretrained import pretrained_model

from .forward import NAME, register_attention
from .inspection import config_reason
from .self_test import packing_reason

logger = logging.getLogger("lowpeak.attention")

# What transformers gives to a model whose user named no attention.
_DEFAULT = "sdpa"


@dataclass(frozen=True)
class AttentionChoice:
    """The attention for a model, and why.

    Args:
        name: "lowpeak", or the implementation that the model has already.
        reason: why, for the log.
        separates_documents: whether a packed row is known to give what each of its documents gives
            alone: tested for "lowpeak", taken for granted of what the user named. A model that is
            refused may keep short documents apart and fail on long ones (sparse attention does).
    """

    name: str
    reason: str
    separates_documents: bool


def choose_attention(model: Any) -> AttentionChoice:
    """The attention that `model`, a transformers `PreTrainedModel`, should train with.

    It is "lowpeak" for a model with transformers' default, sdpa, if its config rules nothing out
    and a self-test shows that two short documents in one row come out as each alone. Otherwise it
    stays what it is: named by the user, or the only one the model has. The test runs four forwards
    over a few tokens and leaves no trace. Where weights are elsewhere (meta device, ZeRO-3) it is
    left out, and a model is served if transformers vouches for its packed rows.
    """
    current = model.config._attn_implementation
    if current == _DEFAULT:
        reason = why_unsupported(model)
        if reason is None:
            return AttentionChoice(NAME, "packed documents come out as each alone", True)
    elif current == "eager" and not model._supports_sdpa:
        reason = config_reason(model) or "transformers has no sdpa for it"
    else:
        return AttentionChoice(current, f"{current!r} is what the model came with", True)
    return AttentionChoice(current, reason, False)


def why_unsupported(model: Any) -> str | None:
    """Why "lowpeak" attention does not serve `model`, a `PreTrainedModel`; None if it does."""
    reason = config_reason(model)
    if reason is not None:
        return reason
    if _weights_are_here(model):
        return packing_reason(model, NAME)
    # The flag says that the layers pass boundaries of documents on to their attention.
    if not model._supports_flash_attn:
        return "its weights are elsewhere, so that packed rows cannot be tested"
    return None


def _weights_are_here(model: Any) -> bool:
    return all(p.numel() > 0 and not p.is_meta for p in model.parameters())


class AttentionHandle:
    """Gives a model the attention back that it had.

    Args:
        model: a `PreTrainedModel`.
        choice: the attention that it has now.
        previous: the one it had.
    """

    def __init__(self, model: PreTrainedModel, choice: AttentionChoice, previous: str) -> None:
        self._model = model
        self._previous = previous
        self.choice = choice

    def remove(self) -> None:
        """Restore the implementation, unless another one was set since. Again: nothing."""
        if self._model.config._attn_implementation == self.choice.name != self._previous:
            self._model.set_attn_implementation(self._previous)
            self._previous = self.choice.name


def use_attention(model: nn.Module, name: str | None = None) -> AttentionHandle:
    """Switch a model to an attention; None lets `choose_attention` decide.

    Args:
        model: `PreTrainedModel`, or a `PeftModel` of one.
        name: of an implementation that transformers knows, or "lowpeak".

    Raises:
        TypeError: for another kind of model.
        ValueError: for name "lowpeak" and a model that it does not serve.
    """
    register_attention()
    base = pretrained_model(model)
    if name is None:
        choice = choose_attention(base)
    elif name == NAME and (refusal := why_unsupported(base)) is not None:
        raise ValueError(
            f"attention={NAME!r} does not serve {type(base).__name__}: {refusal}. Leave it out, "
            "or name another implementation"
        )
    else:
        choice = AttentionChoice(name, "it was asked for", True)
    logger.info("%s: attention %s: %s", type(base).__name__, choice.name, choice.reason)
    previous = base.config._attn_implementation
    if choice.name != previous:
        base.set_attn_implementation(choice.name)
    return AttentionHandle(base, choice, previous)
