"""Trainers whose batches go through the model a group of rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType
from torch import Tensor

from ..seam import trl_modules_of
from .budget import TokenBudget
from .calls import GroupedModel
from .gradients import Factor, Forecast, GroupedGradients, Repeatable
from .rows import Fields

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

# Their expected losses are the loss itself, or it divided by what seldom changes. Those of DPO are
# off by a factor that each batch has for itself.
_FORECAST = frozenset(
    {
        "trl.trainer.distillation_trainer",
        "trl.trainer.grpo_trainer",
        "trl.trainer.rloo_trainer",
    }
)


class TokenBudgetSteps(Trainer):
    """Mixin: `compute_loss` calls the model within `self._budget`, `training_step` differentiates.

    Whoever calls `compute_loss` with gradients must do so inside `training_step`.
    """

    _budget: TokenBudget
    _pending: list[GroupedGradients] | None = None
    _factor: Factor | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        self._factor = None
        return super().train(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of the trainer."""
        if not self._budget.on:
            return super().compute_loss(model, inputs, *args, **kwargs)
        with self._grouped(model) as stand_in:
            return super().compute_loss(stand_in, inputs, *args, **kwargs)

    @contextmanager
    def _grouped(self, model: Any) -> Iterator[Any]:
        """What `compute_loss` is to take for the model."""
        yield GroupedModel(
            model, self._budget, lambda parts, told: self._differentiate(model, parts, told)
        )

    def _differentiate(
        self, model: Any, parts: list[Repeatable], forecast: Forecast | None
    ) -> list[Fields]:
        if self._pending is None:
            raise RuntimeError(
                "max_tokens_per_batch: compute_loss was called with gradients outside of "
                "training_step, which alone gives them to the model. Set max_tokens_per_batch=None"
            )
        accelerator = self.accelerator

        def unsynchronized() -> AbstractContextManager[Any]:
            each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
            if each or not accelerator.sync_gradients:  # else Trainer is in no_sync already
                return contextlib.nullcontext()
            context: AbstractContextManager[Any] = accelerator.no_sync(model)
            return context

        # under FSDP all processes must run as many passes, and forecasts fail on some of them only
        if accelerator.distributed_type == DistributedType.FSDP or _FORECAST.isdisjoint(
            trl_modules_of(type(self))
        ):
            forecast = None
        self._factor = self._factor or Factor()
        alone = accelerator.num_processes == 1
        self._pending.append(GroupedGradients(parts, unsynchronized, forecast, self._factor, alone))
        return self._pending[-1].leaves

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As that of the trainer, whose backward reaches the outputs of groups; then theirs."""
        if not self._budget.on:
            return super().training_step(*args, **kwargs)
        self._pending = []
        try:
            with _after_backward(self.accelerator, self._finish):
                return super().training_step(*args, **kwargs)
        finally:
            self._pending = None

    def _finish(self) -> None:
        pending, self._pending = self._pending or [], []
        for index, gradients in enumerate(pending):
            gradients.backward(synchronize=index == len(pending) - 1)


@contextmanager
def _after_backward(accelerator: Any, finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` after each backward of `accelerator`: TRL measures the time of a step by it."""
    own = vars(accelerator).get("backward")
    backward = accelerator.backward

    def backward_and_finish(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        finish()

    accelerator.backward = backward_and_finish
    try:
        yield
    finally:
        del accelerator.backward
        if own is not None:
            accelerator.backward = own
