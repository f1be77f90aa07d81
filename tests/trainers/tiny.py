"""Tiny models, tokenizer and data sets of `lowpeak_bench.parity`, for the tests."""

import torch
import transformers
from datasets import Dataset

from lowpeak_bench.parity.tiny import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    PAD,
    UNKNOWN,
    VOCABULARY,
    documents,
    guessable_documents,
    guessable_ids,
    judged,
    llama,
    mixtral,
    preferences,
    prompt_completions,
    prompts,
    random_ids,
    reward_model,
    save,
    tokenizer,
    words,
)

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "EOS",
    "PAD",
    "UNKNOWN",
    "VOCABULARY",
    "Dataset",
    "documents",
    "gemma3",
    "guessable_documents",
    "guessable_ids",
    "judged",
    "llama",
    "mixtral",
    "preferences",
    "prompt_completions",
    "prompts",
    "random_ids",
    "reward_model",
    "save",
    "tokenizer",
    "words",
]


def gemma3(window, softcap=None):
    """Two layers, the first with a window of so many tokens, weights as `llama()` has them."""
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            initializer_range=0.3,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"],
            final_logit_softcapping=softcap,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )
