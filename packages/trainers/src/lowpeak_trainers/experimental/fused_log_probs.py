"""What the trainers of `trl.experimental` share that score their sequences by log-probabilities.

They ask for no fused head, so that there is none to replace: lowpeak installs its own once TRL has
built the trainer, and each class overrides the method that made logits.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import Tensor, nn

from lowpeak.config import MemoryConfig
from lowpeak.models import FusedCausalLMOutput, FusedForwardHandle
from lowpeak.models.inspection import read_head
from lowpeak.pretrained import pretrained_model

from ..assembly import (
    RowOptions,
    row_options_of,
    why_prompts_not_shared,
    why_reference_cannot_pack,
)
from ..attention import choose_trainer_attention
from ..fused_forward import install_head, why_head_is_off
from ..padding_free import PaddingFree
from ..padding_free_switch import switch_padding_free
from ..use_cache import KeepsUseCache

logger = logging.getLogger("lowpeak.trainers")


class FusedLogProbs(KeepsUseCache):
    """Mixin: gives the trainer that follows in the bases a fused head and lowpeak's attention.

    Settings come from the trainer's `args` when these are a MemoryConfig, and are the defaults
    otherwise. Unlike TRL's other trainers these make logits of any model, so that a model which
    lowpeak's head does not serve (an encoder-decoder, an adapter on the head) keeps them.

    Raises:
        ValueError: at construction, for settings that do not serve the model.
    """

    # Metrics into which TRL counts prompts and padding, so that they are others without padding.
    _metrics_over_padding: ClassVar[tuple[str, ...]] = ()

    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        owner, config = type(self).__name__, self._memory_config()
        config.validate_memory_config()
        off = self._why_no_head(config)
        if off is None:
            logger.info("fused LM head: on in %s", owner)
        else:
            logger.info("fused LM head: off in %s, by %s; TRL makes logits", owner, off)
        self._layout = PaddingFree()
        choice = choose_trainer_attention(self, config)
        options = row_options_of(self.args)
        switch_padding_free(
            self._layout,
            owner,
            self.args,
            options.padding_free,
            choice,
            lambda: self._why_padded(off, options),
            (lambda: why_prompts_not_shared(self)) if options.share_prompts else None,
        )
        # None: TRL makes logits
        self._handle: FusedForwardHandle | None = None
        if off is None:
            self._handle = self._install(self.model)
            reference = vars(self).get("ref_model")
            if reference is not None:
                self._install(reference)

    @property
    def _head_outputs(self) -> tuple[str, ...]:
        return ("log_probs",)

    def _memory_config(self) -> MemoryConfig:
        return self.args if isinstance(self.args, MemoryConfig) else MemoryConfig()

    def _plain(self, wrapped: nn.Module) -> Any:
        return pretrained_model(self.accelerator.unwrap_model(wrapped))

    def _why_no_head(self, config: MemoryConfig) -> str | None:
        off = why_head_is_off(config)
        unable = self._why_unable() if off is None else None
        if unable is not None and config.fused_lm_head:
            raise ValueError(
                f"fused_lm_head=True does not serve {type(self).__name__}: {unable}. Set "
                "fused_lm_head=None, with which TRL makes logits"
            )
        return off or unable

    def _why_unable(self) -> str | None:
        model = self._plain(self.model)
        if model.config.is_encoder_decoder:
            return "its model, an encoder-decoder"
        try:
            read_head(model)
        except ValueError as error:
            return f"its model: {error}"
        return None

    def _install(self, wrapped: nn.Module) -> FusedForwardHandle:
        return install_head(
            self._plain(wrapped),
            outputs=self._head_outputs,
            scratch_bytes=self._memory_config().lm_head_scratch_bytes,
            layout=self._layout,
        )

    def _why_padded(self, head_off: str | None, options: RowOptions) -> str | None:
        if head_off is not None:
            return f"{head_off}, since only lowpeak's head takes packed rows"
        asked = options.padding_free or options.share_prompts
        if self._metrics_over_padding and not asked:
            names = " and ".join(self._metrics_over_padding)
            return f"{names}, which TRL computes over padding too (padding_free=True does not)"
        return why_reference_cannot_pack(self)

    def _fused(self, model: nn.Module, labels: Tensor, **arguments: Any) -> FusedCausalLMOutput:
        """Log-probabilities [B, S - 1] of `labels` [B, S], 0 where these are -100."""
        # a training step of a trainer's own (OnlineDPO) enters no autocast
        with self.accelerator.autocast():
            output: FusedCausalLMOutput = model(
                **arguments, labels=labels, use_cache=False, fused_lm_head=True
            )
        return output
