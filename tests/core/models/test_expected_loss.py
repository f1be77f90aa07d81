"""What a caller expects of a fused call reaches the head in the head's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_families import assert_same_gradients, gradients
from tiny_models import tiny_model, token_batch
from torch import Tensor

from lowpeak.lm_head import expectation_counts, reset_expectations
from lowpeak.models import (
    ExpectedLoss,
    FusedCausalLMOutput,
    expecting,
    install_fused_forward,
    reduce_memory,
)

OUTPUTS = ("log_probs", "entropy")


@pytest.fixture(autouse=True)
def _new_run() -> Iterator[None]:
    reset_expectations()
    yield
    reset_expectations()


def nll(output: FusedCausalLMOutput) -> Tensor:
    return -output.log_probs.sum()


def weighted(output: FusedCausalLMOutput) -> Tensor:
    """Other weights for every token."""
    log_probs = output.log_probs
    weights = torch.arange(log_probs.numel(), device=log_probs.device).view_as(log_probs)
    return (log_probs * weights).sum() - 3 * (output.entropy * weights.flip(0)).sum()


def nonlinear(output: FusedCausalLMOutput) -> Tensor:
    return (output.log_probs**2 * output.entropy).sum()


EXPECTED = {
    "nll": ExpectedLoss(nll),
    "weighted": ExpectedLoss(weighted, OUTPUTS),
    "nonlinear": ExpectedLoss(nonlinear, OUTPUTS, token_local=True),
}


@dataclass
class Reversed:
    """A batch with its rows in the reverse order, one token shorter."""

    arguments: dict[str, Any]
    labels: Tensor

    def restore(self, output: FusedCausalLMOutput) -> FusedCausalLMOutput:
        fields = {name: x for name in OUTPUTS if (x := getattr(output, name)) is not None}
        longer = {name: torch.nn.functional.pad(x.flip(0), (0, 1)) for name, x in fields.items()}
        return FusedCausalLMOutput(loss=output.loss, label_mask=None, **longer)


def reverse(arguments: dict[str, Any], labels: Tensor) -> Reversed:
    shorter = {name: x.flip(0)[:, :-1] for name, x in arguments.items()}
    return Reversed(shorter, labels.flip(0)[:, :-1])


@pytest.mark.parametrize("layout", [None, reverse])
@pytest.mark.parametrize("name", EXPECTED)
def test_holds_and_changes_nothing(name: str, layout: Any) -> None:
    expected, found = EXPECTED[name], []
    for told in (None, expected):
        model = tiny_model("llama")
        install_fused_forward(model, outputs=OUTPUTS, layout=layout)
        with expecting(told):
            output = model(**token_batch(), fused_lm_head=True)
        found.append(gradients(model, 0.37 * expected.of(output)))
    assert_same_gradients(found[1], found[0])
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == (1, 0)


def test_a_model_that_returns_its_loss_only_needs_not_be_told() -> None:
    model, told = tiny_model("llama"), tiny_model("llama")
    wanted = gradients(model, model(**token_batch()).loss)
    reduce_memory(told)
    for _ in range(2):
        assert_same_gradients(
            gradients(told, 0.5 * told(**token_batch()).loss),
            {name: 0.5 * x for name, x in wanted.items()},
        )
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == (2, 0)


def refuse(output: FusedCausalLMOutput) -> Tensor:
    raise AssertionError("computed, and for nothing")


@pytest.mark.parametrize("names", [("log_probs",), OUTPUTS])
@pytest.mark.parametrize("local", [True, False])
def test_nothing_is_computed_that_the_head_does_not_use(
    names: tuple[str, ...], local: bool
) -> None:
    expected = ExpectedLoss(refuse, names, local)
    model = tiny_model("llama")
    # holds no chunk of all the vocabulary
    handle = install_fused_forward(model, outputs=names, scratch_bytes=53_500)
    with expecting(expected):
        model(**token_batch(), fused_lm_head=True).loss.backward()
    handle.remove()
    handle = install_fused_forward(model, outputs=names)
    with expecting(expected), torch.no_grad():
        model(**token_batch(), fused_lm_head=True)
    with expecting(expected), pytest.raises(AssertionError, match="for nothing"):
        model(**token_batch(), fused_lm_head=True)
    model.lm_head.weight.requires_grad_(False)
    if names == ("log_probs",):
        with expecting(expected):
            model(**token_batch(), fused_lm_head=True).loss.backward()
    handle.remove()
    install_fused_forward(model)
    with expecting(ExpectedLoss(refuse, OUTPUTS)):  # entropy was not asked for
        model(**token_batch(), fused_lm_head=True).loss.backward()


def test_a_head_of_its_own_modules_expects_nothing() -> None:
    model = tiny_model("modernbert_decoder")
    install_fused_forward(model)
    with expecting(ExpectedLoss(refuse)):
        assert gradients(model, model(**token_batch(), fused_lm_head=True).loss)
