"""Batches of the training step benchmark, made here without any download."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

# The methods that a workload exists for, and the tokens it has when a command names none.
WORKLOADS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "sequence": (("sft", "dpo", "grpo"), 8192),
    "ragged": (("dpo",), 8192),
    "shared-prompt": (("dpo", "grpo"), 4608),
}

# Tokens of a sequence that are prompt, where a method has prompts: nearly all of it is trained on.
PROMPT_TOKENS = 64
RAGGED_PAIRS = 8
# The longest sequence that a ragged batch may have is this many times the shortest.
RAGGED_SPREAD = 32
SHARED_PAIRS = 4
SHARED_COMPLETIONS = 8
# A completion is this part of a sequence whose prompt is shared: 512 of 4608 tokens.
SHARED_COMPLETION_PART = 9


@dataclass(frozen=True)
class Example:
    """Tokens of a prompt and of each completion that follows it; a sequence is prompt and one."""

    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One training run: a method on one side, on batches of a workload.

    `tokens` is the length of the sequences; in the workload "ragged" the most one may have.
    """

    method: str
    side: str
    tokens: int
    workload: str = "sequence"

    @property
    def name(self) -> str:
        """Method and workload, as a command line names them."""
        return self.method if self.workload == "sequence" else f"{self.method}-{self.workload}"

    @property
    def examples(self) -> tuple[Example, ...]:
        """What a step trains on, in tokens.

        sequence: one sequence, or one pair, with a prompt of 64 tokens. ragged: 8 pairs; each of
        the 16 sequences has a length drawn log-uniformly from tokens / 32 to tokens, and a quarter
        of the pair's shorter one is the prompt of both. shared-prompt: 4 pairs, or a group of 8
        completions of one prompt; 1 / 9 of a sequence is completion.
        """
        if self.workload == "ragged":
            return ragged_pairs(self.tokens)
        if self.workload == "shared-prompt":
            completion = self.tokens // SHARED_COMPLETION_PART
            pairs = self.method == "dpo"
            count = 2 if pairs else SHARED_COMPLETIONS
            example = Example(self.tokens - completion, (completion,) * count)
            return (example,) * (SHARED_PAIRS if pairs else 1)
        if self.method == "sft":
            return (Example(0, (self.tokens,)),)
        prompt = min(PROMPT_TOKENS, self.tokens // 4)
        completion = self.tokens - prompt
        return (Example(prompt, (completion,) * (2 if self.method == "dpo" else 1)),)


def ragged_pairs(longest: int) -> tuple[Example, ...]:
    """Draw the lengths of 8 preference pairs, the same at every call (seed 0)."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(RAGGED_PAIRS, 2, generator=generator, dtype=torch.float64)
    lengths = (draws * math.log(RAGGED_SPREAD)).exp() * (longest / RAGGED_SPREAD)
    pairs = lengths.round().long().tolist()
    return tuple(
        Example(min(pair) // 4, tuple(length - min(pair) // 4 for length in pair)) for pair in pairs
    )


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one word an id: "w7" is 7; ids 0 to 3 are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>", "<bos>", "<unk>")
    words = {word: index for index, word in enumerate(special)}
    words.update({f"w{index}": index for index in range(len(special), vocabulary)})
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = tokenizer_class(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
    return tokenizer


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    """Draw token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocabulary, (count,), generator=generator).tolist()


def build_dataset(case: Case, vocabulary: int) -> Dataset:
    """Build the examples of one step; every step trains on them."""
    from datasets import Dataset

    if case.method == "sft":
        rows = [random_ids(example.completions[0], vocabulary, 0) for example in case.examples]
        return Dataset.from_dict({"input_ids": rows, "labels": rows})
    texts = [_texts(case, index, vocabulary) for index in range(len(case.examples))]
    columns = {"prompt": [f"{prompt} " for prompt, _ in texts]}
    if case.method == "dpo":
        columns["chosen"] = [completions[0] for _, completions in texts]
        columns["rejected"] = [completions[1] for _, completions in texts]
    return Dataset.from_dict(columns)


def _texts(case: Case, index: int, vocabulary: int) -> tuple[str, list[str]]:
    prompt, completions = _example_ids(case, index, vocabulary)
    # TRL appends <eos> to the completions of DPO, so they are written without their last token.
    return _text(prompt), [_text(ids[:-1]) for ids in completions]


def _example_ids(case: Case, index: int, vocabulary: int) -> tuple[list[int], list[list[int]]]:
    example = case.examples[index]
    seed = index * (1 + len(example.completions))
    prompt = random_ids(example.prompt, vocabulary, seed)
    completions = [
        random_ids(count, vocabulary, seed + 1 + place)
        for place, count in enumerate(example.completions)
    ]
    return prompt, completions


def _text(ids: list[int]) -> str:
    return " ".join(f"w{index}" for index in ids)


def grpo_batch(case: Case, vocabulary: int, group: int, device: torch.device) -> dict[str, Tensor]:
    """Build what TRL's GRPO trainer trains on after generation and scoring.

    The completions of one prompt, of equal lengths, with advantages 1 and -1 in turn. `group` is
    how many completions TRL counts the tokens of.
    """
    prompt, completions = _example_ids(case, 0, vocabulary)
    prompt_ids = torch.tensor([prompt] * len(completions), device=device)
    completion_ids = torch.tensor(completions, device=device)
    signs = [1.0 - 2.0 * (place % 2) for place in range(len(completions))]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "advantages": torch.tensor(signs, device=device),
        "num_items_in_batch": torch.tensor(group * len(completions[0]), device=device),
    }


def shortened(batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The batch with its sequences cut to `tokens`; in GRPO's the completions, not the prompts."""
    return {
        name: value[:, :tokens] if _is_rows(value) and not name.startswith("prompt") else value
        for name, value in batch.items()
    }


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2
