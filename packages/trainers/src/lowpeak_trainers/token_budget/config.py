"""The option `max_tokens_per_batch`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..removed_options import TrainerConfig


@dataclass
class TokenBudgetConfig(TrainerConfig):
    """What comes first in the bases of the configs whose batches are not packed beforehand."""

    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of a batch that go through the model at a time; a longer sequence "
            "goes alone. A batch is still per_device_train_batch_size rows, with the loss, the "
            "gradient and the metrics of all of them. Padding counts where batches are padded. "
            "None computes each batch at once."
        },
    )
