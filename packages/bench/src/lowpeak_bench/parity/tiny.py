"""Tiny random models, a word-level tokenizer and small data sets, all made here without a hub."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 128
PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos>"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(pad_token: str = "<pad>") -> PreTrainedTokenizerFast:
    """Word-level tokenizer: word `w17` is id 17; ids 0..3 are special, 4..6 the roles of a chat."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", "system"]
    words = special + [f"w{index}" for index in range(len(special), VOCABULARY)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    build: Any = PreTrainedTokenizerFast  # transformers has no type for it
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=core,
        pad_token=pad_token,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
    return fast


def words(token_ids: list[int]) -> str:
    """Text that the tokenizer turns into `token_ids` (each at least 7)."""
    return " ".join(f"w{index}" for index in token_ids)


def random_ids(count: int, seed: int) -> list[int]:
    """`count` ids of ordinary words."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(7, VOCABULARY, (count,), generator=generator).tolist()
    return ids


def _llama_config(overrides: dict[str, Any]) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return LlamaConfig(**{**settings, **overrides})


def llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Two layers, hidden 32, 4 heads and 2 kv heads, vocabulary 128.

    The weights are 15 times the usual scale, so that a wrong logit shows in the loss.
    """
    torch.manual_seed(seed)
    return LlamaForCausalLM(_llama_config(overrides))


def neighbour(model: PreTrainedModel, size: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A copy with other weights, by `size` of their deviation: a reference model.

    Two models drawn apart differ by tens of nats, and a loss with exp(difference) in it magnifies
    the rounding of both runs beyond what any comparison allows.
    """
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise, alpha=size * float(weight.std()))
    return other


def reward_model(seed: int = 0) -> LlamaForSequenceClassification:
    """`llama()` with one score for the sequence instead of a language model head."""
    torch.manual_seed(seed)
    build: Any = LlamaForSequenceClassification  # transformers has no type for it
    model: LlamaForSequenceClassification = build(_llama_config({"num_labels": 1}))
    return model


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    """A mixture of 4 experts, of the same size as `llama()`."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=128,
            initializer_range=0.3,
            router_aux_loss_coef=0.1,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def save(model: PreTrainedModel, folder: Path) -> str:
    """Save model and tokenizer, so that trainers can load a reference model from `folder`."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def documents(lengths: list[int], seed: int = 0) -> Dataset:
    """Documents of these lengths, already tokenized."""
    return Dataset.from_dict(
        {"input_ids": [random_ids(n, seed * 1000 + i) for i, n in enumerate(lengths)]}
    )


@functools.cache
def guessable_ids(count: int, length: int) -> list[list[int]]:
    """Rows of ordinary words; every second one, on average, is the first guess of `llama()`.

    Without such rows the token accuracy of a random model is 0 and its test says nothing.
    """
    model: Any = llama()
    model.eval()
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(7, VOCABULARY, (count, length), generator=generator)
    guessed = torch.rand((count, length), generator=generator) < 0.5
    with torch.no_grad():
        for position in range(1, length):
            guess = model(rows[:, :position]).logits[:, -1, 7:].argmax(dim=-1) + 7
            rows[:, position] = torch.where(guessed[:, position], guess, rows[:, position])
    chosen: list[list[int]] = rows.tolist()
    return chosen


def guessable_documents(lengths: list[int]) -> Dataset:
    """Documents of these lengths, already tokenized, that `llama()` half knows."""
    rows = guessable_ids(len(lengths), max(lengths))
    return Dataset.from_dict({"input_ids": [row[:n] for row, n in zip(rows, lengths, strict=True)]})


def prompt_completions(lengths: list[tuple[int, int]]) -> Dataset:
    """Prompts and completions of these lengths, as text that `llama()` half knows."""
    rows = guessable_ids(len(lengths), max(p + c for p, c in lengths))
    return Dataset.from_dict(
        {
            "prompt": [words(row[:p]) for row, (p, _) in zip(rows, lengths, strict=True)],
            "completion": [
                " " + words(row[p : p + c]) for row, (p, c) in zip(rows, lengths, strict=True)
            ],
        }
    )


def preferences(lengths: list[tuple[int, int, int]], seed: int = 0) -> Dataset:
    """Prompts with a chosen and a rejected completion of these lengths, as text.

    `llama()` half knows what was chosen.
    """
    chosen = prompt_completions([(p, c) for p, c, _ in lengths])
    rejected = [" " + words(random_ids(r, seed + i)) for i, (_, _, r) in enumerate(lengths)]
    return chosen.rename_column("completion", "chosen").add_column("rejected", rejected)


def judged(lengths: list[tuple[int, int]], labels: list[bool]) -> Dataset:
    """Prompts and completions as text, each judged good or bad."""
    return prompt_completions(lengths).add_column("label", labels)


def prompts(lengths: list[int], seed: int = 0) -> Dataset:
    """Prompts of these lengths, as text."""
    return Dataset.from_dict(
        {"prompt": [words(random_ids(n, seed + i)) for i, n in enumerate(lengths)]}
    )
