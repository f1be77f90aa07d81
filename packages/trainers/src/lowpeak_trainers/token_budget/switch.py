"""Whether a trainer takes a budget of tokens."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers.training_args import OptimizerNames

from lowpeak.config import DISABLE_VARIABLE, disabled_techniques

from ..compatibility import PACKING_MODULE, REWARD_MODULE
from ..seam import trl_modules_of
from .budget import TokenBudget

logger = logging.getLogger("lowpeak.trainers")


def switch_token_budget(
    trainer: Any, budget: TokenBudget, tokens: int | None, multiple: int | None, share: bool
) -> None:
    """Switch `budget` on if `tokens` is a number.

    Args:
        trainer: once it is built.
        budget: that of its models.
        tokens: its `max_tokens_per_batch`.
        multiple: what padding-free rows are filled up to.
        share: whether prompts are shared.

    Raises:
        ValueError: for a number below 1, and a trainer that cannot have a budget.
    """
    if tokens is None:
        return
    owner = type(trainer).__name__
    if tokens < 1:
        raise ValueError(
            f"max_tokens_per_batch={tokens} is not positive: pass a number of tokens, or None to "
            "compute each batch at once"
        )
    if "token_budget" in disabled_techniques():
        logger.info("token budget: off in %s, by %s", owner, f"{DISABLE_VARIABLE}=token_budget")
        return
    reason = _refusal(trainer, share)
    if reason is not None:
        raise ValueError(
            f"max_tokens_per_batch={tokens} does not serve {owner}: {reason}, or set "
            "max_tokens_per_batch=None"
        )
    sharded = trainer.accelerator.distributed_type == DistributedType.FSDP
    budget.switch(tokens, multiple, _most(trainer.accelerator) if sharded else int)
    logger.info(
        "token budget: at most %d tokens of a batch go through the model at a time in %s",
        tokens,
        owner,
    )


def _refusal(trainer: Any, share: bool) -> str | None:
    if PACKING_MODULE in trl_modules_of(type(trainer)):
        return "its rows can be packed beforehand. Use packing=True"
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed allows one backward pass for each batch only. Use FSDP or DDP"
    if trainer.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        return "LOMO updates weights within the backward pass. Use another optim"
    if vars(trainer).get("aux_loss_enabled"):
        return (
            "the load-balancing loss of its experts is one of the whole batch. Set "
            "router_aux_loss_coef=0.0"
        )
    if share and REWARD_MODULE in trl_modules_of(type(trainer)):
        return (
            "which sequences share a prompt is not known when they are grouped. Set "
            "share_prompts=False"
        )
    return None


def _most(accelerator: Any) -> Any:
    """The largest number over the processes: FSDP gathers weights in step."""

    def most(count: int) -> int:
        found = torch.tensor(count, device=accelerator.device)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return int(found)

    return most
