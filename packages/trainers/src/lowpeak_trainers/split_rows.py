"""Packed rows computed as padded ones, for models whose attention mixes their documents.

The trainer, its collator and its loss keep TRL's packed row; only the model's fused forward sees a
row for each document, and its per-token results go back to where the tokens were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lowpeak.models import FusedCausalLMOutput

from .padding_free import IGNORE_INDEX

# What a packed row is marked by; a call with anything else per token is left as it is.
_MARKS = frozenset(
    {
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
    }
)
_ROW_ARGUMENTS = ("output_router_logits", "return_dict", "use_cache")
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True)
class SplitRow:
    """A packed row [1, T] as rows [D, S] of a document each, padded on the right.

    Args:
        arguments: of the backbone: input_ids and attention_mask [D, S].
        labels: [D, S], -100 at padding.
        places: [D, S] int64, where in the packed row each token was; at padding anything.
        packed_labels: [1, T] as the caller gave them.
    """

    arguments: dict[str, Any]
    labels: Tensor
    places: Tensor
    packed_labels: Tensor

    def restore(self, output: FusedCausalLMOutput) -> FusedCausalLMOutput:
        """Per-token fields [1, T - 1] of the documents' [D, S - 1]."""
        fields = {name: getattr(output, name) for name in _PER_TOKEN}
        joined = {name: self._join(x) for name, x in fields.items() if x is not None}
        mask = self.packed_labels[:, 1:] != IGNORE_INDEX
        return FusedCausalLMOutput(
            loss=output.loss, aux_loss=output.aux_loss, label_mask=mask, **joined
        )

    def _join(self, values: Tensor) -> Tensor:
        scored = (self.labels[:, 1:] != IGNORE_INDEX).to(values.device)
        places = self.places[:, :-1].to(values.device)[scored]
        row = values.new_zeros(self.packed_labels.size(1) - 1)
        return row.index_copy(0, places, values[scored]).unsqueeze(0)


class SplitRows:
    """Splits the packed fused calls of a model; a `lowpeak.models.BatchLayout`.

    It starts switched off, and leaves every call as it is.
    """

    def __init__(self) -> None:
        self.on = False

    def __call__(self, arguments: dict[str, Any], labels: Tensor) -> SplitRow | None:
        """The call with a row for each document, or None where it is no packed row."""
        ends = arguments.get("cu_seq_lens_q")
        if not self.on or ends is None or labels.size(0) != 1:
            return None
        given = {name for name, value in arguments.items() if value is not None}
        if given - _MARKS - {"input_ids", *_ROW_ARGUMENTS}:
            return None
        bounds = ends.tolist()
        spans = [(start, end - start) for start, end in pairwise(bounds)]
        # one token alone predicts nothing: TRL fills rows up with such documents
        spans = [span for span in spans if span[1] > 1] or spans[:1]
        return self._split(arguments, labels, spans)

    def _split(
        self, arguments: Mapping[str, Any], labels: Tensor, spans: list[tuple[int, int]]
    ) -> SplitRow:
        ids = arguments["input_ids"]
        starts, lengths = torch.tensor(spans, device=ids.device).unbind(1)
        columns = torch.arange(max(length for _, length in spans), device=ids.device)
        real = columns < lengths.unsqueeze(1)
        places = (starts.unsqueeze(1) + columns).masked_fill(~real, 0)
        padded_ids = ids[0][places].masked_fill(~real, 0)
        padding = ~real.to(labels.device)
        padded_labels = labels[0][places.to(labels.device)].masked_fill(padding, IGNORE_INDEX)
        padded_labels[:, 0] = IGNORE_INDEX
        kept = {name: arguments[name] for name in _ROW_ARGUMENTS if name in arguments}
        return SplitRow(
            arguments={**kept, "input_ids": padded_ids, "attention_mask": real.long()},
            labels=padded_labels,
            places=places,
            packed_labels=labels,
        )
