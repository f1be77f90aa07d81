"""Which attention a family gets, and whether documents packed into a row stay apart with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from attention_oracle import (
    alone,
    assert_near,
    assert_same_gradients,
    documents,
    gradients,
    packed_row,
    weighted,
)
from family_verdicts import NotBuildable, build
from sharing_oracle import LONG, own_parts, sequences, shared_row, weighted_parts
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lowpeak.attention import choose_attention, use_attention, why_no_shared_prefixes

NOT_BUILDABLE = "not buildable"
# Longer ones than the sliding windows of tiny configurations, which are 16 tokens wide.
LENGTHS = (7, 20, 1, 18)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class AttentionVerdict:
    """What a family gets.

    Args:
        family: `model_type` of its configuration.
        attention: the name of the implementation, or NOT_BUILDABLE.
        separates_documents: whether packed rows are safe with it.
        shares_prefixes: whether the documents of a row may begin with tokens of others.
        reason: why.
    """

    family: str
    attention: str
    separates_documents: bool
    shares_prefixes: bool
    reason: str


def check_attention(family: str, device: torch.device) -> AttentionVerdict:
    """Build a tiny model of the family, let lowpeak choose, and ask the oracle.

    Raises:
        AssertionError: when documents do not stay apart, or do not come out right that share
            tokens, though lowpeak says so.
    """
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    name = names if isinstance(names, str) else names[0]
    try:
        model = build(CONFIG_MAPPING[family], getattr(transformers, name)).to(device).eval()
    except NotBuildable as failure:
        return AttentionVerdict(family, NOT_BUILDABLE, False, False, str(failure))
    choice = choose_attention(model)
    if choice.separates_documents:
        _assert_separate(model, choice.name, device)
    shares = choice.name == "lowpeak" and why_no_shared_prefixes(model) is None
    if shares:
        _assert_shared(model, device)
    return AttentionVerdict(family, choice.name, choice.separates_documents, shares, choice.reason)


def _assert_separate(model: PreTrainedModel, attention: str, device: torch.device) -> None:
    parts = documents(LENGTHS, device)
    wanted = alone(model, parts)
    wanted_gradients = gradients(model, lambda: weighted(alone(model, parts)))
    if attention == "lowpeak":
        use_attention(model)
        assert model.config._attn_implementation == "lowpeak"
    for marks in (True, False):
        row: dict[str, Any] = packed_row(parts, marks=marks)

        def loss(row: dict[str, Any] = row) -> Tensor:
            return weighted(model(**row).logits)

        assert_near(model(**row).logits, wanted, TOLERANCE)
        _assert_common_gradients(gradients(model, loss), wanted_gradients)


def _assert_shared(model: PreTrainedModel, device: torch.device) -> None:
    whole = sequences(LONG, device)
    row = shared_row(LONG, whole)

    def parts() -> list[Tensor]:
        return own_parts(LONG, model(**row).logits)

    wanted = [alone(model, [ids]) for ids in whole]
    for mine, right, (own, _, _) in zip(parts(), wanted, LONG, strict=True):
        assert_near(mine[:, -own:], right[:, -own:], TOLERANCE)
    _assert_common_gradients(
        gradients(model, lambda: weighted_parts(LONG, parts())),
        gradients(model, lambda: weighted_parts(LONG, [alone(model, [ids]) for ids in whole])),
    )


def _assert_common_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    # An expert that no token goes to gets no gradient, or zeros, depending on the batch.
    common = found.keys() & wanted.keys()
    assert_same_gradients(
        {n: found[n] for n in common}, {n: wanted[n] for n in common}, 10 * TOLERANCE
    )
