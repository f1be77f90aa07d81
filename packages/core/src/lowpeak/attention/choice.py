"""Which attention a model trains with when its user named none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lowpeak.pretrained import pretrained_model

from .forward import NAME, register_attention
from .inspection import config_reason, model_reason
from .self_test import packing_reason, sharing_reason

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
            alone. It is tested, whoever named the attention; flex attention, which compiles for
            each shape, is judged by inspection. A model that is refused may keep short documents
            apart and fail on long ones (sparse attention does).
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
        return current_attention(model)
    return AttentionChoice(current, reason, False)


def current_attention(model: Any) -> AttentionChoice:
    """The attention that `model`, a `PreTrainedModel`, has, and whether it separates documents."""
    current = model.config._attn_implementation
    leak = why_not_separate(model, current)
    came = f"{current!r} is what the model came with"
    return AttentionChoice(current, came if leak is None else f"{came}, but {leak}", leak is None)


def why_not_separate(model: Any, name: str) -> str | None:
    """Why packed rows of `model` must not go through the attention `name`; None if they may.

    `model` is a `PreTrainedModel`, `name` that of any attention that transformers knows.
    """
    if name == NAME:
        return why_unsupported(model)
    reason = model_reason(model)
    if reason is not None:
        return reason
    if "flex" not in name and _weights_are_here(model):  # flex compiles for every shape
        with _as_flash_takes_it(model, name):
            return packing_reason(model, name)
    if model._is_stateful or not model._supports_flash_attn:
        return "packed rows of it cannot be tested here"
    return None


@contextmanager
def _as_flash_takes_it(model: Any, name: str) -> Iterator[None]:
    """Autocast to bfloat16 around flash attention of a float32 model, which has no other way."""
    kind = model.device.type
    needed = (
        "flash" in name
        and kind != "cpu"
        and model.dtype == torch.float32
        and not torch.is_autocast_enabled(kind)
    )
    with torch.autocast(kind, torch.bfloat16) if needed else nullcontext():
        yield


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


def why_no_shared_prefixes(model: Any) -> str | None:
    """Why the documents of a row cannot begin with tokens of others in `model`; None if they can.

    A backbone that is given `shared_prefixes` must hand it to every layer's attention, and nothing
    but attention may carry anything from token to token: a self-test of its own shows it, and no
    model whose weights are elsewhere is trusted. `model` is a `PreTrainedModel`, its attention
    must be "lowpeak".
    """
    current = model.config._attn_implementation
    if current != NAME:
        return f"attention {current!r} cannot share them, {NAME!r} can"
    if not _weights_are_here(model):
        return "its weights are elsewhere, so that it cannot be tested"
    return sharing_reason(model, NAME)


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
        leak = why_not_separate(base, name)
        why = "it was asked for" + ("" if leak is None else f", but {leak}")
        choice = AttentionChoice(name, why, leak is None)
    logger.info("%s: attention %s: %s", type(base).__name__, choice.name, choice.reason)
    previous = base.config._attn_implementation
    if choice.name != previous:
        base.set_attn_implementation(choice.name)
    return AttentionHandle(base, choice, previous)
