"""The quickstart's data: real docstrings, arithmetic, and a reward that can be checked by hand."""

import inspect
import json

import pytest

from lowpeak_bench.quickstart.data import (
    arithmetic_reward,
    documented_functions,
    dpo_rows,
    grpo_rows,
    sft_rows,
)


def test_docstrings_are_those_of_the_standard_library() -> None:
    found = {entry.name: entry for entry in documented_functions()}
    assert found["json.dumps"].docstring == inspect.getdoc(json.dumps)
    assert found["json.dumps"].signature == str(inspect.signature(json.dumps))
    lengths = [len(entry.docstring) for entry in documented_functions()]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 80


def test_no_address_of_this_process_is_in_the_data() -> None:
    assert [entry for entry in documented_functions() if " at 0x" in entry.signature] == []


def test_sft_rows_ask_by_signature_and_answer_by_docstring() -> None:
    rows = sft_rows(6, seed=3)
    by_docstring = {entry.docstring: entry for entry in documented_functions()}
    for row in rows:
        (question,), (answer,) = row["prompt"], row["completion"]
        entry = by_docstring[answer["content"]]
        assert question["content"].endswith(f"{entry.name}{entry.signature}")
        assert (question["role"], answer["role"]) == ("user", "assistant")
    assert rows == sft_rows(6, seed=3)
    assert rows != sft_rows(6, seed=4)


def test_dpo_rows_prefer_the_own_docstring_to_another_of_like_length() -> None:
    by_docstring = {entry.docstring: entry for entry in documented_functions()}
    for row in dpo_rows(20, seed=0):
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert row["prompt"] == by_docstring[chosen].question
        assert by_docstring[rejected].name != by_docstring[chosen].name
        assert len(rejected) <= len(chosen) < 2 * len(rejected)


def test_more_rows_than_docstrings_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="lower --steps"):
        sft_rows(10**6, seed=0)


def test_grpo_answers_are_right() -> None:
    for row in grpo_rows(20, seed=0):
        text = row["prompt"][0]["content"]
        stock, sold, delivery = (int(word) for word in text.split() if word.isdigit())
        assert row["answer"] == stock - sold + delivery
        assert sold <= stock


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("There are 12 apples, so 12", 1.0),
        ("12 of 13", 0.5),
        ("-4", 1 / 17),
        ("1,200", 1 / 1189),
        ("no idea", 0.0),
        ("9" * 5000, 1 / (10**18 - 1 - 12 + 1)),
    ],
)
def test_reward_of_the_last_number(text: str, reward: float) -> None:
    completion = [{"role": "assistant", "content": text}]
    assert arithmetic_reward([completion], [12], log_metric=None) == [pytest.approx(reward)]
