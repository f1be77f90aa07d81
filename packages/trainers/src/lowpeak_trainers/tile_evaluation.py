"""Evaluations that feed a TileMetrics from the forward of their loss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from torch import Tensor, nn

from lowpeak.config import MemoryConfig
from lowpeak.models import watching_logits

from .fused_forward import why_head_is_off
from .preparation import SFT_MODULE
from .reference import temporarily
from .seam import trl_modules_of
from .tile_metrics import TileMetrics, TileSums

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

logger = logging.getLogger("lowpeak.trainers")

# Its trainers that are derived from SFTTrainer have losses of their own.
_EXPERIMENTAL = "trl.experimental."


class TileEvaluation(Trainer):
    """Mixin: a TileMetrics as `compute_metrics` sees tiles, and evaluate() makes no logits.

    predict(), which returns the logits, makes them in a forward of its own unless the trainer's
    `prediction_loss_only` is set; the metrics still come from tiles. With lowpeak's head switched
    off a TileMetrics is called with full logits, as any other `compute_metrics` always is.
    """

    _tile_sums: TileSums | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._fed_metrics() is None and isinstance(self.compute_metrics, TileMetrics):
            logger.info(
                "%s gives %s the logits of whole batches, since lowpeak's head is off",
                type(self).__name__,
                type(self.compute_metrics).__name__,
            )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """As `Trainer.prediction_step`; shows the metrics the logits that the loss is made of."""
        sums = self._tile_sums
        if sums is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with watching_logits(sums.add):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As `Trainer.evaluation_loop`; adds the results of a TileMetrics to the metrics."""
        metrics = self._fed_metrics()
        if metrics is None:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        loss_only = True if description != "Prediction" else prediction_loss_only
        sums = TileSums(metrics)
        with temporarily(self, "compute_metrics", None), temporarily(self, "_tile_sums", sums):
            output: Any = super().evaluation_loop(
                dataloader, description, loss_only, ignore_keys, metric_key_prefix
            )
        total = TileSums(metrics)
        for of_rank in gather_object([sums.totals]):
            total.merge(of_rank)
        if not total.totals:
            logger.warning(
                "%s saw no logits in this evaluation of %s: no token has a target, or its loss is "
                "not made by lowpeak's head",
                type(metrics).__name__,
                type(self).__name__,
            )
        start = f"{metric_key_prefix}_"
        for name, value in total.results().items():
            output.metrics[name if name.startswith(start) else start + name] = value
        return output

    def _fed_metrics(self) -> TileMetrics | None:
        """What tiles go to: `compute_metrics`, if it is a TileMetrics and lowpeak's head is on.

        Raises:
            ValueError: for a trainer whose evaluation has no tiles, and for options that a
                TileMetrics cannot serve.
        """
        metrics = self.compute_metrics
        if not isinstance(metrics, TileMetrics) or why_head_is_off(self._memory_config()):
            return None
        name, owner = type(metrics).__name__, type(self).__name__
        if not _scores_by_sft(type(self)):
            raise ValueError(
                f"compute_metrics is {name}, a TileMetrics, which {owner} cannot feed: only "
                "SFTTrainer does so. Pass a function"
            )
        if self.args.include_for_metrics:
            raise ValueError(
                f"include_for_metrics={self.args.include_for_metrics!r}: {name} is a TileMetrics, "
                "which sees logits and targets only. Remove it, or pass a function"
            )
        if self.preprocess_logits_for_metrics is not None:
            raise ValueError(
                f"preprocess_logits_for_metrics is given, but {name} is a TileMetrics, which sees "
                "the logits as they are. Remove it, or pass a function"
            )
        return metrics

    if TYPE_CHECKING:

        def _memory_config(self) -> MemoryConfig: ...


def _scores_by_sft(trainer: type) -> bool:
    experimental = any(parent.__module__.startswith(_EXPERIMENTAL) for parent in trainer.__mro__)
    return SFT_MODULE in trl_modules_of(trainer) and not experimental
