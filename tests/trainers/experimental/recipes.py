"""One small run of each experimental method, under stock TRL or under lowpeak."""

from __future__ import annotations

import importlib
import random
import warnings

import parity
import tiny
from peft import LoraConfig
from tokenizers import decoders

METHODS = ("ORPO", "CPO", "GKD", "GOLD", "TPO", "OnlineDPO", "A2PO", "GMPO")
# Completions are generated, and replayed in the second run.
ONLINE = ("OnlineDPO", "A2PO", "GMPO")
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4
PROMPTS = [5, 17, 9, 30, 3, 12, 22, 7, 14, 26, 4, 11, 19, 8, 25, 6, 10, 16, 21, 13]
OPTIONS = {
    "ORPO": {"remove_unused_columns": False, "max_length": 64},
    "CPO": {"remove_unused_columns": False, "max_length": 64},
    "GKD": {"max_length": 64, "max_new_tokens": 6, "lmbda": 0.0},
    "GOLD": {"max_length": 64, "max_completion_length": 6, "lmbda": 0.0},
    "TPO": {},
    "OnlineDPO": {"max_new_tokens": 8, "max_length": 64},
    "A2PO": {"max_completion_length": 8, "num_value_samples": 2, "beta2": 0.1},
    "GMPO": {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.0,
    },
}


def module(package, method):
    """The module of `method` in `package`, "trl" or "lowpeak_trainers"."""
    name = "online_dpo" if method == "OnlineDPO" else method.lower()
    with warnings.catch_warnings():
        # TRL's own, where its stable trainers have not been imported before
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")
        return importlib.import_module(f"{package}.experimental.{name}")


def reward(prompts, completions, **kwargs):
    """1 or 0, by the number of letters: A2PO takes rewards to be binary."""
    return [float(len(text) % 3 == 1) for text in completions]


def graded(prompts, completions, **kwargs):
    """Reward almost without ties."""
    return [float(sum(i * ord(c) for i, c in enumerate(text)) % 97) for text in completions]


def chats(lengths):
    rows = tiny.guessable_ids(len(lengths), max(p + c for p, c, _ in lengths))
    return tiny.Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": "user", "content": tiny.words(row[:p])},
                    {"role": "assistant", "content": tiny.words(row[p : p + c])},
                ]
                for row, (p, c, _) in zip(rows, lengths, strict=True)
            ]
        }
    )


def triples(lengths):
    gold = [" " + tiny.words(tiny.random_ids(7 - i % 3, 50 + i)) for i in range(len(lengths))]
    return tiny.preferences(lengths).add_column("reference", gold)


def teacher(**overrides):
    return tiny.llama(seed=2, **{"hidden_size": 48, "initializer_range": 0.15, **overrides})


def keywords(method):
    """What the trainer of `method` needs beyond model, args and tokenizer."""
    if method in ONLINE:
        rewards = reward if method == "A2PO" else graded
        return {"train_dataset": tiny.prompts(PROMPTS), "reward_funcs": rewards}
    data = {"GKD": chats, "GOLD": chats, "TPO": triples}.get(method, tiny.preferences)
    further = {"teacher_model": teacher()} if method in ("GKD", "GOLD") else {}
    return {"train_dataset": data(PAIRS), "eval_dataset": data(PAIRS[:5]), **further}


def tokenizer_of(method):
    tokenizer = tiny.tokenizer()
    if method == "A2PO":
        tokenizer.padding_side = "left"
    if method == "GOLD":  # which takes tokenizers on bytes only, and tells them by this
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def build(package, method, folder, *, model=None, lora=None, further=None, **options):
    """The trainer of `method`; `options` go to the config, `lora` to a LoraConfig.

    `further` replaces arguments of the trainer.
    """
    random.seed(0)  # GKD asks it which batches are on-policy
    settings = parity.settings(folder, **{**OPTIONS[method], **options})
    adapter = {}
    if lora is not None:
        adapter["peft_config"] = LoraConfig(r=4, init_lora_weights=False, **lora)
    home = module(package, method)
    return getattr(home, f"{method}Trainer")(
        model=tiny.llama() if model is None else model,
        args=getattr(home, f"{method}Config")(**settings),
        **{
            "processing_class": tokenizer_of(method),
            **keywords(method),
            **adapter,
            **(further or {}),
        },
    )


def assert_parity(method, folder, *, model=tiny.llama, ours=None, **options):
    """Five equal steps under TRL and under lowpeak, which alone takes the options `ours`."""
    return parity.assert_parity(
        lambda: build("trl", method, folder, model=model(), **options),
        lambda: build("lowpeak_trainers", method, folder, model=model(), **options, **(ours or {})),
        online=method in ONLINE,
    )
