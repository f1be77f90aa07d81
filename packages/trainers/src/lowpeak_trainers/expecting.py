"""Trainers tell the head of their model what gradients to expect, and say how often they held."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowpeak.lm_head import expectation_counts, reset_expectations
from lowpeak.models import ExpectedLoss, expecting

from .expectations import LOSSES
from .reference import ReferenceFirst
from .seam import trl_modules_of
from .token_budget.steps import TokenBudgetSteps

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

logger = logging.getLogger("lowpeak.trainers")

_FUNCTIONS = ("fused_lm_head", "fused_divergence")
# What makes the loss of a trainer of TRL; an override may make another one.
_METHODS = ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies")


class ExpectsGradients(Trainer):
    """Mixin: the head of the model is told what `compute_loss` is going to make of its outputs.

    Nothing is told where the loss is not that of TRL's trainer. A run begins with all expectations
    believed, see `lowpeak.lm_head.expectation_counts`, and ends with one line of the log.
    """

    # Why a batch came without an expectation; None where none did.
    _unexpected: str | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        reset_expectations()
        result = super().train(*args, **kwargs)
        self._report_expectations()
        return result

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of the trainer."""
        with expecting(lambda: self._expected_loss(inputs)):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _expected_loss(self, inputs: Mapping[str, Any]) -> ExpectedLoss | None:
        module = next((name for name in trl_modules_of(type(self)) if name in LOSSES), None)
        if module is None:
            return None
        overridden = _overridden(self, module)
        if overridden is not None:
            self._unexpected = f"{overridden} makes a loss of its own"
            return None
        found = LOSSES[module](self, inputs)
        if isinstance(found, ExpectedLoss):
            return found
        self._unexpected = found
        return None

    def _report_expectations(self) -> None:
        owner = type(self).__name__
        counts = expectation_counts()
        found = [counts[name] for name in _FUNCTIONS if name in counts]
        held, missed = sum(x.held for x in found), sum(x.missed for x in found)
        if held or missed:
            logger.info(
                "expected gradients: held in %d of %d backward passes of %s%s",
                held,
                held + missed,
                owner,
                "" if self._unexpected is None else f"; for others, {self._unexpected}",
            )
        elif self._unexpected is not None:
            logger.info("expected gradients: none in %s: %s", owner, self._unexpected)


def _overridden(trainer: Any, module: str) -> str | None:
    """The method that takes the place of one that makes the loss in TRL's `module`, or None."""
    for name in _METHODS:
        if name in vars(trainer):
            return f"{name} of this {type(trainer).__name__}"
        for owner in type(trainer).__mro__:
            if owner in (ExpectsGradients, TokenBudgetSteps, ReferenceFirst) or name not in vars(
                owner
            ):
                continue
            if owner.__module__ != module:
                return f"{owner.__name__}.{name}"
            break
    return None
