"""One call that takes the logits out of the training steps of plain transformers users."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput, MoeCausalLMOutputWithPast

from lowpeak.attention import AttentionHandle, use_attention
from lowpeak.config import (
    DISABLE_VARIABLE,
    MemoryConfig,
    disabled_techniques,
    technique_enabled,
    why_attention_is_off,
)
from lowpeak.pretrained import pretrained_model

from .expected_loss import SUM_OF_LOG_PROBS
from .fused_forward import (
    ForwardSettings,
    FusedForward,
    FusedForwardHandle,
    bind_forward,
    given_only,
)
from .logit_tiles import watching_logits
from .self_test import check_loss

logger = logging.getLogger("lowpeak.models")


class ReducedMemoryHandle:
    """Undoes `reduce_memory`."""

    def __init__(self, handles: Sequence[FusedForwardHandle | AttentionHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Restore the model as it was. Calling it again does nothing."""
        for handle in self._handles:
            handle.remove()


def reduce_memory(
    model: nn.Module, config: MemoryConfig | None = None, *, eval_logits: bool = True
) -> ReducedMemoryHandle:
    """Let a transformers causal LM train without the logits of its batches, nor N x N masks.

    For `transformers.Trainer` and training loops of one's own. Afterwards

    - in training, a call with labels returns the loss the model would return, and `logits` None;
    - in eval, a call with labels is the model's own, with logits, so that compute_metrics and
      predict() are right; with `eval_logits=False` it returns the loss alone, and evaluate()
      builds no logits;
    - every other call, generate() among them, is the model's own.

    The first training step tests loss and logits on a few tokens against the model's own. A model
    whose user named no attention gets "lowpeak" attention, if that serves it: see
    `lowpeak.attention.choose_attention`.

    Args:
        model: `PreTrainedModel` with a language model head, or a `PeftModel` of one; before it goes
            to a Trainer, DistributedDataParallel or torch.compile.
        config: what to do; None is `MemoryConfig()`.
        eval_logits: whether a call with labels in eval mode returns logits. The model cannot see
            whether its caller has compute_metrics: pass False where it has none.

    Raises:
        TypeError: for another kind of model.
        ValueError: as `install_fused_forward`; for attention="lowpeak" and a model that it does not
            serve; and in the first training step for a model whose own
            loss is not the mean negative log-likelihood of the next token.
    """
    config = MemoryConfig() if config is None else config
    config.validate_memory_config()
    base = pretrained_model(model)
    handles: list[FusedForwardHandle | AttentionHandle] = []
    if technique_enabled("head", config.fused_lm_head):
        settings = ForwardSettings(scratch_bytes=config.lm_head_scratch_bytes)

        def adapt(fused: FusedForward) -> Callable[..., Any]:
            return _loss_forward(fused, eval_logits)

        handles.append(bind_forward(base, settings, adapt))
    else:
        by = DISABLE_VARIABLE if "head" in disabled_techniques() else "fused_lm_head=False"
        logger.info("%s: fused LM head off, by %s", type(base).__name__, by)
    off = why_attention_is_off(config)
    if off is None:
        handles.append(use_attention(base, config.attention))
    else:
        logger.info("%s: attention left as it is, by %s", type(base).__name__, off)
    return ReducedMemoryHandle(handles)


def _loss_forward(fused: FusedForward, eval_logits: bool) -> Callable[..., Any]:
    checked = False

    def forward(
        self: Any,
        *,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **arguments: Any,
    ) -> Any:
        nonlocal checked
        given = labels if shift_labels is None else shift_labels
        if given is None or (eval_logits and not self.training):
            arguments |= given_only(labels, shift_labels, num_items_in_batch)
            return fused.own_forward(self, **arguments)
        if not checked:
            _check_loss(self, fused, given)
            checked = True
        # the caller is given their mean only
        expected = SUM_OF_LOG_PROBS
        result = fused(self, arguments, labels, shift_labels, num_items_in_batch, expected)
        output = (
            CausalLMOutput(loss=result.loss)
            if result.aux_loss is None
            else MoeCausalLMOutputWithPast(loss=result.loss, aux_loss=result.aux_loss)
        )
        return output if _wants_dict(self, arguments) else output.to_tuple()

    return forward


def _wants_dict(model: Any, arguments: dict[str, Any]) -> bool:
    return arguments.get("return_dict", model.config.return_dict) is not False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_loss(model: Any, fused: FusedForward, labels: Tensor) -> None:
    fused.route(model, labels)  # raises before the loss is compared

    def own_loss(token_ids: Tensor) -> Tensor:
        own: Tensor = fused.own_forward(
            model, input_ids=token_ids, labels=token_ids, use_cache=False, return_dict=True
        ).loss
        return own

    def fused_loss(token_ids: Tensor) -> Tensor:
        with watching_logits(None):
            loss = fused(model, {"input_ids": token_ids}, token_ids, None, None).loss
        assert loss is not None
        return loss

    check_loss(model, own_loss, fused_loss, labels)
