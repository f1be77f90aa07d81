"""A tiny chat model with a byte-level tokenizer, and recorded results, all made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lowpeak_bench.quickstart.data import documented_functions

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 400 ids, trained on docstrings, like SmolLM2's own in kind."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [entry.docstring for entry in documented_functions()[:50]]
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        chat_template=CHAT_TEMPLATE,
    )


def config(vocabulary: int) -> LlamaConfig:
    """Two layers, hidden 32, tied embeddings."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def save_model(folder: Path) -> Path:
    """Save a random model with its tokenizer, as the quickstart trains from."""
    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(config(len(words)))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def result(trainer: str, side: str, **overrides: Any) -> dict[str, Any]:
    """What a run of two steps records, with round numbers."""
    peak = 3 << 30 if side == "trl" else 2 << 30
    state = 1 << 30
    step = {
        "seconds": 2.0,
        "state_bytes": state,
        "peak_bytes": peak,
        "backward_peak_bytes": peak - (256 << 20),
        "backward_seconds": 1.5,
        "allocation_count": 3,
        "timeline": [(0.0, state), (0.5, peak), (1.5, state + (1 << 20)), (2.0, state)],
        "loss": 2.5,
        "grad_norm": 4.0,
    }
    first = {**step, "loss": 3.0, "seconds": 4.0}
    first |= {"peak_bytes": peak - (1 << 20), "backward_peak_bytes": peak - (512 << 20)}
    return {
        "trainer": trainer,
        "side": side,
        "precision": "float32",
        "steps": [first, {**step, **overrides}],
        "differing_tokens": None,
    }
