"""`activation_offloading`: what a training step saves for backward waits on the host."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TrainingArguments

from lowpeak.config import DISABLE_VARIABLE, disabled_techniques
from lowpeak.offload import OffloadActivations

from .token_budget.config import TokenBudgetConfig

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

logger = logging.getLogger("lowpeak.trainers")

OPTION = "activation_offloading"


@dataclass
class OffloadingConfig(TokenBudgetConfig):
    """What comes first in the bases of the configs to which TRL gave no `activation_offloading`."""

    activation_offloading: bool = field(
        default=False,
        metadata={"help": "Whether to offload the activations to the CPU."},
    )


class OffloadsActivations(Trainer):
    """Mixin: `training_step` runs within `activation_offload`, if there is one.

    Evaluation, generation and reference models run without gradients, for which nothing is saved.
    """

    activation_offload: OffloadActivations | None = None
    """What moves the activations of this trainer; its `stats()` and `explain()` tell of them."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        result = super().train(*args, **kwargs)
        offload = self.activation_offload
        if offload is not None and offload.stats().forwards:
            logger.info("activation offloading in %s: %s", type(self).__name__, offload.explain())
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As that of the trainer."""
        if self.activation_offload is None:
            return super().training_step(*args, **kwargs)
        with self.activation_offload:
            return super().training_step(*args, **kwargs)


@contextmanager
def offloading_hidden_from_trl(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While a trainer is built with these arguments, its config asks TRL for no offloading.

    TRL's helper needs an accelerator, and gives wrong gradients where it meets two graphs.
    """
    configs = [
        config
        for config in (*args, *kwargs.values())
        if isinstance(config, TrainingArguments) and wants_offloading(config)
    ]
    for config in configs:
        setattr(config, OPTION, False)
    try:
        yield
    finally:
        for config in configs:
            setattr(config, OPTION, True)


def wants_offloading(args: TrainingArguments) -> bool:
    """Whether these arguments of a trainer ask for it; some configs of TRL have no such option."""
    return bool(vars(args).get(OPTION))


def switch_offloading(trainer: Any) -> None:
    """Let the training steps of `trainer`, which is built, offload; or log what forbids it.

    What is moved and why is logged by `OffloadActivations`, in the first steps.
    """
    owner = type(trainer).__name__
    if "offload" in disabled_techniques():
        logger.info("activation offloading: off in %s, by %s=offload", owner, DISABLE_VARIABLE)
        return
    # use_cpu=True trains on the CPU of a machine that has an accelerator
    on_cpu = trainer.args.device.type == "cpu"
    offload = OffloadActivations(device_backend="null" if on_cpu else "auto")
    if isinstance(trainer, OffloadsActivations):
        trainer.activation_offload = offload
    else:  # a trainer of TRL that enabled() built
        trainer.training_step = _within(offload, trainer.training_step)


def _within(offload: OffloadActivations, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        with offload:
            return step(*args, **kwargs)

    return training_step
