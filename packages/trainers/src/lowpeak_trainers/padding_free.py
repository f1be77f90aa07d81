"""Padded batches computed without their padding: all sequences as documents of one packed row.

The trainer, its collator and its loss keep the padded layout; only the model's fused forward sees
the packed row, and its per-token results go back to where the tokens were.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.models import FusedCausalLMOutput

from .prompt_sharing import SharedPrefix, choose_prefixes, prefix_facts

logger = logging.getLogger("lowpeak.trainers")

IGNORE_INDEX = -100
# Arguments that say nothing of single tokens; a call with any other is left padded.
_ROW_ARGUMENTS = frozenset({"output_router_logits", "return_dict", "use_cache"})
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True)
class PackedRow:
    """A padded batch [B, S] as one row [1, T] of its T real tokens.

    Args:
        arguments: of the backbone: input_ids, position_ids [1, T] that restart in each document,
            cu_seq_lens_q and cu_seq_lens_k [documents + 1] int32, max_length_q and max_length_k.
            With shared prompts also shared_prefixes [documents, 3], and documents that begin with
            tokens of earlier ones hold the others only: their positions go on behind those.
        labels: [1, T], -100 at the first token of each document, which nothing predicts.
        places: [T] int64, where in the flattened batch each token was. A shared token is where it
            was computed, and has no label elsewhere.
        padded_labels: [B, S] as the caller gave them.
    """

    arguments: dict[str, Any]
    labels: Tensor
    places: Tensor
    padded_labels: Tensor

    def restore(self, output: FusedCausalLMOutput) -> FusedCausalLMOutput:
        """Per-token fields [B, S - 1] of the packed row's [1, T - 1], 0 at padding."""
        fields = {name: getattr(output, name) for name in _PER_TOKEN}
        spread = {name: self._spread(x) for name, x in fields.items() if x is not None}
        mask = self.padded_labels[:, 1:] != IGNORE_INDEX
        return FusedCausalLMOutput(
            loss=output.loss, aux_loss=output.aux_loss, label_mask=mask, **spread
        )

    def pad(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, S, H] of the packed row's [1, T, H], 0 at padding."""
        places = self.places.to(hidden.device)
        padded = hidden.new_zeros(self.padded_labels.numel(), hidden.size(-1))
        padded = padded.index_copy(0, places, hidden[0, : places.numel()])
        return padded.view(*self.padded_labels.shape, -1)

    def _spread(self, values: Tensor) -> Tensor:
        # values[0, i] belongs to token i + 1, those of the filling to none; a document's first
        # token holds 0
        places = self.places[1:].to(values.device)
        padded = values.new_zeros(self.padded_labels.numel())
        padded = padded.index_copy(0, places, values[0, : places.numel()])
        return padded.view(self.padded_labels.shape)[:, 1:]


class PaddingFree:
    """Packs the padded fused calls of a model; a `lowpeak.models.BatchLayout`.

    A call is left padded where it has no padding mask [B, S] of zeros and ones, where it carries
    anything else per token or per image, where padding has a label, and where a label follows
    padding, from which it would have to be predicted.

    It starts switched off, and leaves every call as it is.
    """

    def __init__(self) -> None:
        self._on = False
        self._multiple: int | None = None
        self._share = False
        self._reported = False

    def switch(self, on: bool, multiple: int | None = None, share_prompts: bool = False) -> None:
        """Switch packing on or off.

        Args:
            multiple: the packed row is filled up to a multiple of this many tokens, the filling
                being a document of its own without labels; None for no filling. A call for router
                logits is never filled, since the load-balancing loss counts every token.
            share_prompts: compute once what rows begin with alike; but for router logits, for the
                same reason. Needs an attention that takes `shared_prefixes`.

        Raises:
            ValueError: for a `multiple` below 1.
        """
        if multiple is not None and multiple < 1:
            raise ValueError(f"multiple={multiple}: pass a positive number of tokens or None")
        self._on, self._multiple, self._share = on, multiple, share_prompts

    @property
    def on(self) -> bool:
        """Whether calls are packed."""
        return self._on

    @property
    def shares(self) -> bool:
        """Whether what rows begin with alike is computed once."""
        return self._share

    @property
    def multiple(self) -> int | None:
        """What a packed row is filled up to a multiple of, None for nothing."""
        return self._multiple

    def __call__(self, arguments: dict[str, Any], labels: Tensor) -> PackedRow | None:
        """The call as one packed row, or None to leave it padded."""
        if not self._on:
            return None
        given = {name for name, value in arguments.items() if value is not None}
        mask = arguments.get("attention_mask")
        if mask is None or mask.dim() != 2 or "input_ids" not in given:
            return None
        if given - _ROW_ARGUMENTS - {"input_ids", "attention_mask"}:
            return None
        real = mask != 0
        starts = real & ~nn.functional.pad(real[:, :-1], (1, 0))
        starts[:, 0] = real[:, 0]
        # labels of padding, or predicted from it
        orphans = (starts | ~real)[:, 1:] & (labels[:, 1:] != IGNORE_INDEX)
        facts = real.new_empty(0, dtype=torch.long)
        if self._share and not arguments.get("output_router_logits"):
            labelled = (labels[:, 1:] != IGNORE_INDEX).to(real.device)
            facts = prefix_facts(arguments["input_ids"], real, labelled)
        # shapes below depend on these numbers
        lengths, breaks, orphan_count, known = _numbers(real, starts, orphans, facts)
        if orphan_count or not sum(lengths) or max(breaks) > 1:
            return None
        shared = choose_prefixes(lengths, known) if known else [SharedPrefix()] * len(lengths)
        if known and not self._reported:
            self._reported = True
            logger.info(
                "shared prompts: %d of the %d tokens of the first batch need no computation",
                sum(prefix.tokens for prefix in shared),
                sum(lengths),
            )
        return self._pack(arguments, labels, real, lengths, shared)

    def _pack(
        self,
        arguments: dict[str, Any],
        labels: Tensor,
        real: Tensor,
        lengths: list[int],
        shared: list[SharedPrefix],
    ) -> PackedRow:
        device = real.device
        skipped = [prefix.tokens for prefix in shared]
        documents = _documents(lengths, shared)
        tokens = sum(lengths) - sum(skipped)
        if any(skipped):
            order = real.cumsum(1, dtype=torch.int32)
            real = real & (order > torch.tensor(skipped, device=device).unsqueeze(1))
        places = real.reshape(-1).nonzero().squeeze(1)
        ids = arguments["input_ids"].reshape(-1).index_select(0, places)
        fill = 0
        if self._multiple is not None and not arguments.get("output_router_logits"):
            fill = -tokens % self._multiple
        if fill:
            documents.append((fill, 0, 0))
        own = [count for count, _, _ in documents]
        ends = torch.tensor([0, *own], device=device).cumsum(0)
        positions = torch.arange(tokens + fill, device=device)
        before = torch.tensor([count for _, _, count in documents], device=device)
        begins = (ends[:-1] - before).repeat_interleave(
            torch.tensor(own, device=device), output_size=tokens + fill
        )
        row_labels = labels.reshape(-1).index_select(0, places.to(labels.device))
        row_labels = nn.functional.pad(row_labels, (0, fill), value=IGNORE_INDEX)
        row_labels[ends[:-1].to(labels.device)] = IGNORE_INDEX
        bounds, longest = ends.to(torch.int32), max(own)
        sharing = {"shared_prefixes": torch.tensor(documents)} if any(skipped) else {}
        return PackedRow(
            arguments={
                **{name: arguments[name] for name in _ROW_ARGUMENTS if name in arguments},
                "input_ids": nn.functional.pad(ids, (0, fill)).unsqueeze(0),
                "position_ids": (positions - begins).unsqueeze(0),
                "cu_seq_lens_q": bounds,
                "cu_seq_lens_k": bounds,
                "max_length_q": longest,
                "max_length_k": longest,
                **sharing,
            },
            labels=row_labels.unsqueeze(0),
            places=places,
            padded_labels=labels,
        )


def _documents(lengths: list[int], shared: list[SharedPrefix]) -> list[tuple[int, int, int]]:
    """Of each row with tokens: its own, the document that it begins like, the tokens it shares."""
    documents: list[tuple[int, int, int]] = []
    document_of_row = []
    for length, prefix in zip(lengths, shared, strict=True):
        document_of_row.append(len(documents))
        if length:
            owner = document_of_row[prefix.owner]
            documents.append((length - prefix.tokens, owner, prefix.tokens))
    return documents


def _numbers(
    real: Tensor, starts: Tensor, orphans: Tensor, facts: Tensor
) -> tuple[list[int], list[int], int, list[int]]:
    """Tokens and unbroken stretches of each row, labels at or behind padding, and `facts`."""
    rows = real.size(0)
    count = orphans.sum().reshape(1).to(real.device)
    values = torch.cat([real.sum(1), starts.sum(1), count, facts]).tolist()
    return values[:rows], values[rows : 2 * rows], values[2 * rows], values[2 * rows + 1 :]
