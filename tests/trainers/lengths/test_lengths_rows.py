"""Token counts of every format of rows, against the preparation of TRL's own trainers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import parity
import pytest
import tiny
import trl
from datasets import Dataset, IterableDataset

from lowpeak_trainers.lengths import DatasetError, measure

TOOLS = [{"type": "function", "function": {"name": "w9", "parameters": {}}}]
WITH_TOOLS = "{% for tool in tools or [] %}w7 {{ tool['function']['name'] }} {% endfor %}"


def text(count: int, seed: int) -> str:
    return tiny.words(tiny.random_ids(count, seed))


def said(role: str, count: int, seed: int) -> dict[str, str]:
    return {"role": role, "content": text(count, seed)}


def chat(*counts: int, seed: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [said(roles[turn % 2], n, seed + turn) for turn, n in enumerate(counts)]


SIZES = [(3, 5), (1, 9), (12, 2), (4, 4)]
SFT: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text(a, a)} for a, _ in SIZES] + [{"text": text(4, 0) + "<eos>"}],
    "messages": [{"messages": chat(a, b, a, seed=a)} for a, b in SIZES],
    "conversations": [
        {
            "conversations": [
                {"from": "user", "value": text(a, 1)},
                {"from": "assistant", "value": text(b, 2)},
            ]
        }
        for a, b in SIZES
    ],
    "prompt-completion texts": [
        {"prompt": text(a, a) + " ", "completion": text(b, b)} for a, b in SIZES
    ],
    "prompt-completion messages": [
        {"prompt": [said("user", a, a)], "completion": [said("assistant", b, b)]} for a, b in SIZES
    ],
    "tools": [
        {"messages": chat(a, b, seed=a), "tools": TOOLS, "chat_template_kwargs": {}}
        for a, b in SIZES
    ],
    "tools as JSON": [
        {"messages": chat(a, b, seed=a), "tools": json.dumps(TOOLS * a)} for a, b in SIZES
    ],
}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "preference texts": [
        {"prompt": text(a, a) + " ", "chosen": text(b, b), "rejected": text(a + b, 1)}
        for a, b in SIZES
    ],
    "preference messages": [
        {
            "prompt": [said("user", a, a)],
            "chosen": [said("assistant", b, b)],
            "rejected": [said("assistant", a, a)],
        }
        for a, b in SIZES
    ],
    "preference without prompt": [
        {
            "chosen": [said("user", a, a), said("assistant", b, b)],
            "rejected": [said("user", a, a), said("assistant", a + b, b + 1)],
        }
        for a, b in SIZES
    ],
}


def tokenizer(name: str) -> Any:
    made = tiny.tokenizer()
    if name.startswith("tools"):
        made.chat_template = WITH_TOOLS + tiny.CHAT_TEMPLATE
    return made


@pytest.mark.parametrize("name", SFT)
def test_sft_rows_count_as_trl_tokenises_them(name: str, tmp_path) -> None:
    trainer = trl.SFTTrainer(
        model=tiny.llama(),
        args=trl.SFTConfig(**parity.settings(tmp_path, max_length=None)),
        train_dataset=Dataset.from_list(SFT[name]),
        processing_class=tokenizer(name),
    )
    prepared = trainer.train_dataset
    got = measure(Dataset.from_list(SFT[name]), tokenizer(name))
    np.testing.assert_array_equal(got.tokens, [len(ids) for ids in prepared["input_ids"]])
    np.testing.assert_array_equal(got.prompts, [row.count(-100) for row in prepared["labels"]])
    assert got.format == name.split()[0].replace("conversations", "messages").replace(
        "tools", "messages"
    )
    assert got.conversational == (name not in ("text", "prompt-completion texts"))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_count_as_trl_tokenises_them(name: str, tmp_path) -> None:
    trainer = trl.DPOTrainer(
        model=tiny.llama(),
        ref_model=tiny.llama(),
        args=trl.DPOConfig(**parity.settings(tmp_path, max_length=None)),
        train_dataset=Dataset.from_list(PAIRS[name]),
        processing_class=tokenizer(name),
    )
    wanted = [
        len(row["prompt_ids"]) + len(row[answer])
        for row in trainer.train_dataset
        for answer in ("chosen_ids", "rejected_ids")
    ]
    got = measure(Dataset.from_list(PAIRS[name]), tokenizer(name))
    np.testing.assert_array_equal(got.tokens, wanted)
    prompts = [len(row["prompt_ids"]) for row in trainer.train_dataset]
    np.testing.assert_array_equal(got.prompts, np.repeat(prompts, 2))
    assert (got.sequences_per_row, got.rows) == (2, len(SIZES))


def test_tokenised_rows_need_no_tokenizer() -> None:
    got = measure(Dataset.from_dict({"input_ids": [[1, 2, 3], [], [4]]}), None)
    assert got.tokens.tolist() == [3, 0, 1]
    assert got.tokens.dtype == np.int32
    assert not got.prompts.any()


def test_rows_without_content_count_nothing() -> None:
    texts = Dataset.from_dict({"text": ["w7 w8", None, ""]})
    assert measure(texts, tiny.tokenizer()).tokens.tolist() == [3, 0, 0]
    chats = Dataset.from_dict({"messages": [chat(2, 2, seed=1), []]})
    assert measure(chats, tiny.tokenizer()).tokens.tolist() == [8, 0]
    pairs = Dataset.from_dict({"chosen": ["w7 w8", None], "rejected": ["w7 w9 w9", None]})
    assert measure(pairs, tiny.tokenizer()).tokens.tolist() == [3, 4, 0, 0]


@pytest.mark.parametrize("name", [*SFT, *PAIRS])
def test_a_stream_counts_the_same(name: str) -> None:
    rows = Dataset.from_list((SFT | PAIRS)[name] * 300)  # more than one batch
    whole = measure(rows, tokenizer(name))
    stream = measure(rows.to_iterable_dataset(), tokenizer(name))
    np.testing.assert_array_equal(stream.tokens, whole.tokens)
    np.testing.assert_array_equal(stream.prompts, whole.prompts)
    assert (stream.format, stream.conversational) == (whole.format, whole.conversational)


def test_max_rows_draws_from_a_dataset_and_begins_a_stream() -> None:
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in range(100)]})
    assert measure(rows.to_iterable_dataset(), None, max_rows=5).tokens.tolist() == [0, 1, 2, 3, 4]
    drawn = measure(rows, None, max_rows=20, seed=1).tokens.tolist()
    assert len(set(drawn)) == 20
    assert drawn == measure(rows, None, max_rows=20, seed=1).tokens.tolist()
    assert drawn != measure(rows, None, max_rows=20, seed=2).tokens.tolist()
    assert measure(rows, None, max_rows=1000).rows == 100


def test_processes_count_the_same() -> None:
    rows = Dataset.from_list(SFT["messages"] * 3)
    one, two = (measure(rows, tiny.tokenizer(), num_proc=n) for n in (None, 2))
    np.testing.assert_array_equal(one.tokens, two.tokens)


def test_another_column_and_another_template() -> None:
    rows = Dataset.from_dict({"body": ["w7 w8"], "input_ids": [[1]]})
    assert measure(rows, tiny.tokenizer(), text_field="body").tokens.tolist() == [3]
    chats = Dataset.from_list([{"messages": chat(2, 3, seed=1)}])
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    assert measure(chats, tiny.tokenizer(), chat_template=template).tokens.tolist() == [5]


def test_images_are_noticed() -> None:
    rows = Dataset.from_list([{"messages": chat(2, 2, seed=1), "images": [1]}])
    assert measure(rows, tiny.tokenizer()).images


REFUSING = "{{ raise_exception('roles must alternate') }}"
REFUSED = {
    "text field": ({"body": ["x"]}, {"text_field": "text"}, "no such column; there are body"),
    "columns": ({"a": [1], "b": [2]}, {}, r"the columns are a, b(?s:.*)messages(?s:.*)input_ids"),
    "mixed": (
        {"prompt": ["w7"], "completion": [chat(2, seed=1)]},
        {},
        "completion messages, prompt text",
    ),
    "template": (
        {"messages": [chat(2, 2, seed=1)]},
        {"chat_template": REFUSING},
        "the chat template refuses a row: roles must alternate",
    ),
    "empty": ({"text": []}, {}, "no rows"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_say_why(name: str, stream: bool) -> None:
    columns, options, message = REFUSED[name]
    rows = Dataset.from_dict(columns)
    if stream:
        rows = IterableDataset.from_generator(rows.__iter__)
    with pytest.raises(DatasetError, match=message):
        measure(rows, tiny.tokenizer(), **options)


def test_what_the_tokenizer_lacks() -> None:
    with pytest.raises(DatasetError, match="--model_name_or_path is needed"):
        measure(Dataset.from_dict({"text": ["x"]}), None)
    plain = tiny.tokenizer()
    plain.chat_template = None
    with pytest.raises(DatasetError, match=r"no chat template(?s:.*)--chat_template_path"):
        measure(Dataset.from_list(SFT["messages"]), plain)
