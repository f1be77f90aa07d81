"""What is recommended for data of which the right answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from lowpeak_trainers.lengths import Advice, Lengths, advise, summarise
from lowpeak_trainers.lengths.advice import percent


def advice(tokens, max_lengths, *, prompts=None, pairs=False, limit=None, batch_size=8) -> Advice:
    array = np.asarray(tokens, dtype=np.int32)
    prompts = np.zeros_like(array) if prompts is None else np.asarray(prompts, dtype=np.int32)
    form = "preference" if pairs else "text"
    lengths = Lengths(array, prompts, form, False, 2 if pairs else 1, False)
    return advise(summarise(lengths, max_lengths, position_limit=limit, batch_size=batch_size))


def test_the_shortest_that_cuts_next_to_nothing() -> None:
    tokens = np.random.default_rng(0).integers(20, 500, 4000)
    got = advice(tokens, [256, 512, 1024])
    assert (got.max_length, got.strategy) == (512, "bfd")
    assert got.arguments == 'max_length=512, packing=True, packing_strategy="bfd"'
    assert got.why.startswith("max_length=512 cuts no token")
    assert "packed rows instead of 4,000" in got.cost


def test_a_longer_one_where_its_rows_are_fuller() -> None:
    # 300 and 150 leave 62 of 512; 900 holds three of one or six of the other.
    got = advice([300] * 300 + [150] * 300, [512, 900])
    assert (got.max_length, got.strategy) == (900, "bfd")
    got = advice([300] * 300 + [150] * 300 + [31] * 600, [512, 900])
    assert got.max_length == 512, "short rows fill up what the long ones leave"


def test_split_where_every_candidate_cuts() -> None:
    got = advice([3000] * 100 + [100] * 1000, [512, 1024])
    assert (got.max_length, got.strategy) == (1024, "bfd_split")
    cut = 100 * (3000 - 1024) / (100 * 3000 + 1000 * 100)
    assert f"cuts {percent(cut)} of the tokens" in got.why
    assert f"100 rows (9.1 %) become several documents: {percent(cut)} of the tokens" in got.cost
    assert "max_length=2960 would hold 99 % of the tokens uncut" in got.cost


def test_never_beyond_the_positions_of_the_model() -> None:
    tokens = [3000] * 100 + [100] * 1000
    assert advice(tokens, [1024, 4096]).max_length == 4096
    got = advice(tokens, [1024, 4096], limit=2048)
    assert (got.max_length, got.strategy) == (1024, "bfd_split")
    assert "the model has 2,048 positions" in got.cost
    assert advice(tokens, [4096], limit=2048).max_length == 4096, "nothing else was asked for"


def test_no_packing_where_it_saves_nothing() -> None:
    got = advice([500] * 800, [512])
    assert (got.max_length, got.strategy) == (512, None)
    assert "Do not pack" in got.why
    assert got.arguments == "max_length=512"


def test_pairs_are_not_packed() -> None:
    got = advice([20, 40, 30, 60] * 50, [64], pairs=True)
    assert got.strategy is None
    assert "padding_free" in got.why
    got = advice([20, 40, 30, 60] * 50, [16, 40], pairs=True, prompts=[10, 10, 18, 18] * 50)
    assert got.max_length == 40
    assert got.why.startswith("Even max_length=40 cuts 13.3 % of the tokens")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0 %"), (1e-6, "< 0.1 %"), (0.0012, "0.1 %"), (0.5, "50.0 %"), (1, "100.0 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text
