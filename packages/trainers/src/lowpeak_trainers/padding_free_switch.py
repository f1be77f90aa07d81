"""Whether a trainer computes its batches without padding, and where TRL must not hear of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lowpeak.attention import AttentionChoice
from lowpeak.config import DISABLE_VARIABLE, disabled_techniques

from .padding_free import PaddingFree
from .removed_options import TrainerConfig

logger = logging.getLogger("lowpeak.trainers")

# Packed rows cost these no mask of tokens by tokens.
_WITHOUT_MASK = ("lowpeak", "flash")


@contextmanager
def hidden_from_trl(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[dict[int, Any]]:
    """While a trainer is built with these arguments, its config has no `padding_free`.

    SFTTrainer would flatten its batches itself, and refuse max_length with it; DPOTrainer would
    warn that it ignores the option. Yields the hidden values by the id of the config.
    """
    configs = [x for x in (*args, *kwargs.values()) if isinstance(x, TrainerConfig)]
    wanted = [config.padding_free for config in configs]
    for config in configs:
        config.padding_free = None
    try:
        yield {id(config): value for config, value in zip(configs, wanted, strict=True)}
    finally:
        for config, value in zip(configs, wanted, strict=True):
            config.padding_free = value


def switch_padding_free(
    layout: PaddingFree,
    owner: str,
    args: Any,
    flag: bool | None,
    attention: AttentionChoice,
    unable: Callable[[], str | None],
    sharing: Callable[[], str | None] | None = None,
) -> None:
    """Switch `layout` on if `flag` and the model's attention allow it; log why.

    `args` are those of the trainer, `flag` is its padding_free. `unable` says what else keeps the
    model of `owner` from packed rows, or None; it is asked where nothing else does. `sharing` is
    given where share_prompts=True, and says likewise what keeps its models from shared prompts.

    Raises:
        ValueError: where padding_free=True was asked for, and the attention lets the documents of
            a packed row see each other or needs a mask for it, or the model is unable; where
            prompts were to be shared and cannot be.
    """
    refusal = _switched_off(flag) or why_not_packed(attention) or unable()
    if flag and refusal is not None and "padding_free" not in disabled_techniques():
        raise ValueError(
            f"padding_free=True does not serve {owner}: {refusal}. Set padding_free=None, which "
            "pads where it must"
        )
    multiple = vars(args).get("pad_to_multiple_of")
    multiple = multiple if isinstance(multiple, int) else None
    share = sharing is not None and "padding_free" not in disabled_techniques()
    if sharing is not None and share:
        _require_sharing(owner, refusal, sharing)
    layout.switch(refusal is None, multiple, share)
    if refusal is None:
        logger.info("padding-free: on in %s, with attention %r", owner, attention.name)
    else:
        logger.info("padding-free: off in %s, by %s", owner, refusal)
    if share:
        logger.info("shared prompts: on in %s", owner)


def _require_sharing(owner: str, refusal: str | None, sharing: Callable[[], str | None]) -> None:
    reason = sharing() if refusal is None else f"its batches are padded, by {refusal}"
    if reason is not None:
        raise ValueError(
            f"share_prompts=True does not serve {owner}: {reason}. It needs padding-free batches "
            "and attention 'lowpeak', which padding_free=None and attention=None choose where they "
            "serve the model: leave those to lowpeak, or set share_prompts=False"
        )


def why_not_packed(attention: AttentionChoice) -> str | None:
    """What keeps a model with this attention from packed rows in place of padded ones, or None."""
    if not attention.separates_documents:
        return f"attention {attention.name!r} does not keep documents apart ({attention.reason})"
    if not any(name in attention.name for name in _WITHOUT_MASK):
        return f"attention {attention.name!r}, which needs a mask of tokens by tokens for it"
    return None


def _switched_off(flag: bool | None) -> str | None:
    if flag is False:
        return "padding_free=False"
    if "padding_free" in disabled_techniques():
        return f"{DISABLE_VARIABLE}=padding_free"
    return None
