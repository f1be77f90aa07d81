"""Models, data and trainers of the training step benchmark, made here without any download."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SIDES = {"trl": "trl", "lowpeak": "lowpeak_trainers"}
METHODS = ("sft", "dpo", "grpo")

# google/gemma-3-1b-pt, config.json.
GEMMA_3_1B: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 32768,
}
# The same architecture with one full-attention layer in six, small enough for a test.
TINY: Mapping[str, Any] = {
    **GEMMA_3_1B,
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
}
CONFIGS = {"gemma-3-1b": GEMMA_3_1B, "tiny": TINY}

# Tokens of a sequence that are prompt, where a method has prompts: nearly all of it is trained on.
PROMPT_TOKENS = 64
# GRPO needs groups of two; a step trains on one of them.
GENERATIONS = 2


@dataclass(frozen=True)
class Case:
    """One training run: a method on one side with sequences of `tokens` tokens."""

    method: str
    side: str
    tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, for DPO and GRPO."""
        return min(PROMPT_TOKENS, self.tokens // 4)


def build_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a Gemma 3 model with random weights on the device, sdpa attention, seed 0."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    auto_model: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = auto_model.from_config(
            Gemma3TextConfig(**CONFIGS[name]), dtype=dtype, attn_implementation="sdpa"
        )
    return model


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
    """Build one example; every step trains on it."""
    from datasets import Dataset

    if case.method == "sft":
        ids = random_ids(case.tokens, vocabulary, 0)
        return Dataset.from_dict({"input_ids": [ids], "labels": [ids]})
    prompt = _text(random_ids(case.prompt_tokens, vocabulary, 0))
    if case.method == "grpo":
        return Dataset.from_dict({"prompt": [prompt]})
    # TRL appends <eos> to both completions.
    words = case.tokens - case.prompt_tokens - 1
    chosen, rejected = (_text(random_ids(words, vocabulary, seed)) for seed in (1, 2))
    return Dataset.from_dict({"prompt": [prompt + " "], "chosen": [chosen], "rejected": [rejected]})


def _text(ids: list[int]) -> str:
    return " ".join(f"w{index}" for index in ids)


def build_trainer(
    case: Case,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    output: str,
    callback: Any,
) -> Any:
    """Build the trainer of a case; TRL's and lowpeak's get the same arguments."""
    from transformers import PrinterCallback

    module = importlib.import_module(SIDES[case.side])
    trainer_class = getattr(module, f"{case.method.upper()}Trainer")
    config_class = getattr(module, f"{case.method.upper()}Config")
    device = model.device
    arguments = config_class(**_arguments(case, model, steps, output))
    dataset = build_dataset(case, model.config.vocab_size)
    options: dict[str, Any] = {}
    if case.method == "grpo":
        trainer_class = _with_prepared_batch(trainer_class, _grpo_batch(case, model, device))
        options["reward_funcs"] = _no_reward
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[callback],
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(case: Case, model: PreTrainedModel, steps: int, output: str) -> dict[str, Any]:
    on_cpu = model.device.type == "cpu"
    arguments: dict[str, Any] = {
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-6,  # TRL's default for DPO and GRPO
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": model.dtype == torch.bfloat16,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "seed": 0,
    }
    if case.method == "sft":
        arguments["max_length"] = None
    elif case.method == "dpo":
        arguments.update(max_length=None, precompute_ref_log_probs=True)
    else:
        completion = case.tokens - case.prompt_tokens
        arguments.update(
            max_completion_length=completion,
            num_generations=GENERATIONS,
            steps_per_generation=GENERATIONS,
            beta=0.0,
        )
    return arguments


def _grpo_batch(case: Case, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Build what TRL's GRPO trainer trains on after generation and scoring: one completion."""
    ids = torch.tensor([random_ids(case.tokens, model.config.vocab_size, 0)], device=device)
    prompt, completion = ids[:, : case.prompt_tokens], ids[:, case.prompt_tokens :]
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.ones(1, device=device),
        # TRL counts the tokens of the whole group.
        "num_items_in_batch": torch.tensor(GENERATIONS * completion.numel(), device=device),
    }


def _with_prepared_batch(trainer_class: type, batch: Mapping[str, Any]) -> Any:
    """Return a subclass whose steps take `batch` instead of generating completions."""

    def prepare(self: Any, generation_batch: Any) -> dict[str, Any]:
        return dict(batch)

    return type(f"Prepared{trainer_class.__name__}", (trainer_class,), {"_prepare_inputs": prepare})


def _no_reward(completions: list[Any], **others: Any) -> list[float]:
    return [0.0] * len(completions)
