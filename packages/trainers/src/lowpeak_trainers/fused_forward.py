"""TRL's `add_fused_lm_head`, answered with the fused forward of `lowpeak.models`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn
from transformers import TrainingArguments

from lowpeak.config import DISABLE_VARIABLE, MemoryConfig, technique_enabled
from lowpeak.models import BatchLayout, FusedForwardHandle, install_fused_forward
from lowpeak.models.adapters import is_adapter_layer

from .compatibility import check_trl
from .seam import FusedHeadFunction

logger = logging.getLogger("lowpeak.trainers")

# Weak on both sides: a handle reaches its model, so that a reference to it would keep the model.
_handles: WeakKeyDictionary[nn.Module, ReferenceType[FusedForwardHandle]] = WeakKeyDictionary()


def add_fused_lm_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Drop-in for `trl.trainer.add_fused_lm_head`: same arguments, same protocol.

    Afterwards `model(..., labels=labels, fused_lm_head=True)` returns a FusedCausalLMOutput with
    float32 per-token fields [batch, length - 1] and never builds logits [batch, length, vocab].
    `model` is the causal LM itself, not its PEFT wrapper. On a model that has such a head already,
    as when one trainer follows another, the new settings replace the old.
    """
    install_head(model, temperature, cast_lm_head_to_fp32, outputs)


check_trl(add_fused_lm_head)


class HeadFromConfig:
    """Answers one trainer's requests for fused heads as its MemoryConfig says.

    `settings` is called when a head is asked for: a trainer knows its arguments by then. `owner`
    names the trainer in the log, and `layout` is that of its batches.
    """

    def __init__(
        self,
        owner: str,
        settings: Callable[[], MemoryConfig],
        layout: BatchLayout | None = None,
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._layout = layout
        self._reported = False

    def __call__(
        self,
        stock: FusedHeadFunction,
        model: nn.Module,
        temperature: float,
        cast_lm_head_to_fp32: bool,
        outputs: tuple[str, ...],
    ) -> None:
        config = self._settings()
        config.validate_memory_config()
        reason = why_head_is_off(config)
        if not self._reported:
            self._reported = True
            self._report(reason)
        _check_adapters(model, reason, cast_lm_head_to_fp32)
        if reason is None:
            scratch = config.lm_head_scratch_bytes
            install_head(model, temperature, cast_lm_head_to_fp32, outputs, scratch, self._layout)
        else:
            stock(model, temperature, cast_lm_head_to_fp32, outputs)

    def _report(self, reason: str | None) -> None:
        if reason is None:
            logger.info("fused LM head: on in %s", self._owner)
        else:
            logger.info("fused LM head: off in %s, by %s; TRL's own is used", self._owner, reason)


def takes_adapters(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a trainer built with these arguments may have an adapter on its head.

    Not where TRL's own head is used, nor where it makes a float32 copy of the head's forward.
    """
    configs = [x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)]
    casts = any(vars(config).get("cast_lm_head_to_fp32") for config in configs)
    off = any(why_head_is_off(x) for x in (*configs, MemoryConfig()) if isinstance(x, MemoryConfig))
    return not (casts or off)


def _check_adapters(model: nn.Module, head_off: str | None, casts: bool) -> None:
    head: Any = model
    if not is_adapter_layer(head.get_output_embeddings()):
        return
    if head_off is not None:
        raise ValueError(
            f"Applying a PEFT adapter to `lm_head` is not supported by TRL's own head, and "
            f"lowpeak's is off by {head_off}: switch it on, or remove 'lm_head' from target_modules"
        )
    if casts:
        raise ValueError(
            "cast_lm_head_to_fp32=True is not supported with an adapter on `lm_head`: set it to "
            "False, or remove 'lm_head' from target_modules"
        )


def report_no_head(owner: str, config: MemoryConfig) -> None:
    """Log that the model of `owner` has no language model head; warn of options for one."""
    config.validate_memory_config()
    logger.info("fused LM head: nothing to do in %s, whose model has no such head", owner)
    ignored = [
        f"{name}={value!r}"
        for name, value in (
            ("fused_lm_head", config.fused_lm_head or None),
            ("lm_head_scratch_bytes", config.lm_head_scratch_bytes),
        )
        if value is not None
    ]
    if ignored:
        logger.warning("%s ignores %s: its model has no LM head", owner, ", ".join(ignored))


def why_head_is_off(config: MemoryConfig) -> str | None:
    """What switched lowpeak's fused head off, or None when it is on."""
    if technique_enabled("head", config.fused_lm_head):
        return None
    return "fused_lm_head=False" if config.fused_lm_head is False else f"{DISABLE_VARIABLE}=head"


def install_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    scratch_bytes: int | None = None,
    layout: BatchLayout | None = None,
) -> FusedForwardHandle:
    """`install_fused_forward`; a head that lowpeak_trainers gave `model` before is taken off."""
    reference = _handles.pop(model, None)
    previous = None if reference is None else reference()
    if previous is not None:
        previous.remove()
    handle = install_fused_forward(
        model,
        temperature=temperature,
        cast_lm_head_to_fp32=cast_lm_head_to_fp32,
        outputs=outputs,
        scratch_bytes=scratch_bytes,
        layout=layout,
    )
    _handles[model] = ref(handle)
    return handle
