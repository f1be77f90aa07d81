"""TRL's `add_fused_lm_head`, answered with the fused forward of `lowpeak.models`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lowpeak import MemoryConfig
from lowpeak.models import install_fused_forward
from transformers import PreTrainedModel

from .compatibility import check_trl
from .seam import FusedHeadFunction

logger = logging.getLogger("lowpeak.trainers")


def add_fused_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Drop-in for `trl.trainer.add_fused_lm_head`: same arguments, same protocol.

    Afterwards `model(..., labels=labels, fused_lm_head=True)` returns a FusedCausalLMOutput with
    float32 per-token fields [batch, length - 1] and never builds logits [batch, length, vocab].
    `model` is the causal LM itself, not its PEFT wrapper.
    """
    install_fused_forward(
        model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs
    )


check_trl(add_fused_lm_head)


class HeadFromConfig:
    """Answers one trainer's requests for fused heads as its MemoryConfig says.

    `settings` is called when the first head is asked for: a trainer knows its arguments by then.
    `owner` names the trainer in the log.
    """

    def __init__(self, owner: str, settings: Callable[[], MemoryConfig]) -> None:
        self._owner = owner
        self._settings = settings
        self._reported = False

    def __call__(
        self,
        stock: FusedHeadFunction,
        model: PreTrainedModel,
        temperature: float,
        cast_lm_head_to_fp32: bool,
        outputs: tuple[str, ...],
    ) -> None:
        reason = why_head_is_off(self._settings())
        self._report(reason)
        make = stock if reason else add_fused_lm_head
        make(model, temperature, cast_lm_head_to_fp32, outputs)

    def _report(self, reason: str | None) -> None:
        if self._reported:
            return
        self._reported = True
        if reason is None:
            logger.info("fused LM head: on in %s", self._owner)
        else:
            logger.info("fused LM head: off in %s, %s; TRL's own head is used", self._owner, reason)


def why_head_is_off(config: MemoryConfig) -> str | None:
    """Why lowpeak's fused head is not to be used, or None when it is."""
    if config.fused_lm_head is False:
        return "fused_lm_head=False"
    return None
