"""The formats of rows that TRL's trainers take, and the token counts of a batch of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from trl import extract_prompt, maybe_convert_to_chatml

from .reading import DatasetError

__all__ = ["Format", "count_tokens", "find_format", "is_conversational"]

Format = Literal["tokenised", "preference", "prompt-completion", "messages", "text"]
FORMATS = """Understood are:
  messages (or conversations)          a conversation, for SFT
  prompt and completion                texts or messages, for SFT and KTO
  chosen and rejected, maybe a prompt  texts or messages, for DPO and reward models
  text                                 plain text; another column by --dataset_text_field
  input_ids                            tokens already"""
Batch = Mapping[str, Sequence[Any]]


def find_format(columns: Sequence[str], text_field: str | None) -> Format:
    """Tell the format from the names of the columns, as TRL's trainers do.

    A ``text_field`` other than None was asked for. Raises DatasetError for unknown columns.
    """
    present = set(columns)
    if text_field is not None:
        if text_field not in present:
            raise DatasetError(
                f"--dataset_text_field {text_field}: no such column; there are {', '.join(columns)}"
            )
        return "text"
    if "input_ids" in present:
        return "tokenised"
    if {"chosen", "rejected"} <= present:
        return "preference"
    if {"prompt", "completion"} <= present:
        return "prompt-completion"
    if present & {"messages", "conversations"}:
        return "messages"
    if "text" in present:
        return "text"
    raise DatasetError(f"the columns are {', '.join(columns)}, in no format known.\n{FORMATS}")


def is_conversational(row: Mapping[str, Any], form: Format) -> bool:
    """Whether a row holds messages, for which a chat template is needed."""
    fields: dict[Format, tuple[str, ...]] = {
        "messages": ("messages", "conversations"),
        "prompt-completion": ("completion", "prompt"),
        "preference": ("chosen", "rejected", "prompt"),
    }
    kinds = {
        name: isinstance(row[name], list)
        for name in fields.get(form, ())
        if row.get(name) is not None
    }
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{name} {'messages' if m else 'text'}" for name, m in kinds.items())
        raise DatasetError(f"a row mixes messages and text ({told}): TRL takes one or the other")
    return any(kinds.values())


def count_tokens(
    batch: Batch,
    *,
    form: Format,
    text_field: str,
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template: str | None,
) -> dict[str, list[int]]:
    """Count the tokens of a batch of columns as TRL 1.16 would tokenise them.

    Returns ``tokens`` and ``prompts``: of each sequence the length and how much of it is prompt,
    0 where all is trained. A preference row is two sequences, chosen and rejected, in turn. A row
    without content counts 0. Raises DatasetError where the chat template refuses a row.
    """
    names = list(batch)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    if form == "tokenised":
        lengths = [len(row["input_ids"] or ()) for row in rows]
        return {"tokens": lengths, "prompts": [0] * len(lengths)}
    assert tokenizer is not None, "only tokenised rows need none"
    render = _Renderer(tokenizer, chat_template)
    if form == "text":
        texts = [render.ended(row[text_field] or "") for row in rows]
        return {"tokens": [len(ids) for ids in render.ids(texts)], "prompts": [0] * len(texts)}
    rows = [maybe_convert_to_chatml(row) for row in rows]
    if form == "messages":
        texts = [render.messages(row["messages"], row) for row in rows]
        lengths = [len(ids) for ids in render.ids(texts, special=False)]
        return {"tokens": lengths, "prompts": [0] * len(lengths)}
    if form == "preference":
        rows = [_with_prompt(row) for row in rows]
    return _count_completions(rows, form, render)


def _with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A pair with what both answers begin with as its prompt, where it has no prompt of its own."""
    if row.get("prompt") is not None:
        return row
    if not row["chosen"] or not row["rejected"]:
        return {**row, "prompt": None}
    return {**row, **extract_prompt(row)}


def _count_completions(
    rows: Sequence[Mapping[str, Any]], form: Format, render: _Renderer
) -> dict[str, list[int]]:
    names = ("completion",) if form == "prompt-completion" else ("chosen", "rejected")
    chat = next((is_conversational(row, form) for row in rows), False)
    prompts, wholes = [], []
    for row in rows:
        if chat:
            prompt = row["prompt"] or []
            prompts.append(render.messages(prompt, row, add_generation_prompt=True))
            wholes += [render.messages(prompt + (row[name] or []), row) for name in names]
        else:
            prompts.append(row["prompt"] or "")
            wholes += [(row["prompt"] or "") + render.ended(row[name] or "") for name in names]
    whole_ids = render.ids(wholes, special=not chat)
    prompt_ids = [ids for ids in render.ids(prompts, special=not chat) for _ in names]
    shared = [_common(*pair) for pair in zip(prompt_ids, whole_ids, strict=True)]
    # TRL takes for the prompt of a pair what it shares with both.
    least = np.asarray(shared, dtype=np.int64).reshape(-1, len(names)).min(axis=1)
    return {
        "tokens": [len(ids) for ids in whole_ids],
        "prompts": np.repeat(least, len(names)).tolist(),
    }


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences share before they differ."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


class _Renderer:
    """Texts and tokens of rows, with one tokenizer and one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    def ids(self, texts: list[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text; ``special``: with the tokens that the tokenizer adds."""
        if not texts:
            return []
        # verbose: a row longer than the model's positions is what we are here to count.
        encoded = self.tokenizer(texts, add_special_tokens=special, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def ended(self, text: str) -> str:
        """The text with the end-of-sequence token that TRL adds."""
        end = self.tokenizer.eos_token
        if not text or not isinstance(end, str) or text.endswith(end):
            return text
        return text + end

    def messages(
        self, messages: list[dict[str, Any]] | None, row: Mapping[str, Any], **options: Any
    ) -> str:
        """A conversation in the chat template, with the row's tools."""
        if not messages:
            return ""
        tools = row.get("tools")
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=json.loads(tools) if isinstance(tools, str) else tools,
                chat_template=self.chat_template,
                tokenize=False,
                **options,
                **(row.get("chat_template_kwargs") or {}),
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            start = repr(messages)[:120]
            raise DatasetError(
                f"the chat template refuses a row: {error}\n  {start} ..."
            ) from error
        return str(rendered)
