"""Models and trainers of the training step benchmark, made here without any download."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lowpeak_bench.training_data import Case, build_dataset, grpo_batch, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Side:
    """The package whose trainers are used, and the arguments that only they get.

    `workloads` are those it takes part in; empty is all.
    """

    package: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    workloads: tuple[str, ...] = ()


STOCK = "trl"
SIDES: Mapping[str, Side] = {
    STOCK: Side("trl"),
    "lowpeak": Side("lowpeak_trainers"),
    "lowpeak-shared": Side("lowpeak_trainers", {"share_prompts": True}, ("shared-prompt",)),
}

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

# GRPO needs groups of two, even where a step trains on one of them.
SMALLEST_GROUP = 2


@dataclass(frozen=True)
class Run:
    """How a trainer runs: steps at most, and how many come first with sequences cut short."""

    steps: int
    output: str
    short_steps: int = 0
    short_tokens: int = 0


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


def build_trainer(
    case: Case,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    run: Run,
    callback: Any,
) -> Any:
    """Build the trainer of a case; TRL's and lowpeak's get the same arguments."""
    from transformers import PrinterCallback

    side = SIDES[case.side]
    module = importlib.import_module(side.package)
    trainer_class = getattr(module, f"{case.method.upper()}Trainer")
    config_class = getattr(module, f"{case.method.upper()}Config")
    arguments = config_class(**_arguments(case, model, run), **side.arguments)
    dataset = build_dataset(case, model.config.vocab_size)
    options: dict[str, Any] = {}
    if case.method == "grpo":
        options["reward_funcs"] = _no_reward
        batch = grpo_batch(case, model.config.vocab_size, _group(case), model.device)
        trainer_class = _with_prepared_batch(trainer_class, batch)
    if run.short_steps and case.tokens > run.short_tokens:
        trainer_class = _with_short_steps(trainer_class, run)
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


def _arguments(case: Case, model: PreTrainedModel, run: Run) -> dict[str, Any]:
    on_cpu = model.device.type == "cpu"
    arguments: dict[str, Any] = {
        "output_dir": run.output,
        "max_steps": run.steps,
        "per_device_train_batch_size": len(case.examples),
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
        completions = case.examples[0].completions
        arguments.update(
            per_device_train_batch_size=len(completions),
            max_completion_length=completions[0],
            num_generations=_group(case),
            steps_per_generation=_group(case) // len(completions),
            beta=0.0,
        )
    return arguments


def _group(case: Case) -> int:
    return max(SMALLEST_GROUP, len(case.examples[0].completions))


def _with_prepared_batch(trainer_class: type, batch: Mapping[str, Any]) -> Any:
    """Return a subclass whose steps take `batch` instead of generating completions."""

    def prepare(self: Any, generation_batch: Any) -> dict[str, Any]:
        return dict(batch)

    return type(f"Prepared{trainer_class.__name__}", (trainer_class,), {"_prepare_inputs": prepare})


def _with_short_steps(trainer_class: Any, run: Run) -> Any:
    """Return a subclass whose first steps train on the start of each sequence."""

    def prepare(self: Any, inputs: Any) -> Any:
        prepared = trainer_class._prepare_inputs(self, inputs)
        short = self.state.global_step < run.short_steps
        return shortened(prepared, run.short_tokens) if short else prepared

    return type(f"Short{trainer_class.__name__}", (trainer_class,), {"_prepare_inputs": prepare})


def _no_reward(completions: list[Any], **others: Any) -> list[float]:
    return [0.0] * len(completions)
