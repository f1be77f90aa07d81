"""Options that TRL and transformers no longer have: an old script is told what to write instead."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Self

from lowpeak.config import MemoryConfig

_LOGITS = "remove it: no trainer builds logits for its loss, so there is nothing to switch on"
_COLLATOR = "remove it, or pass a data_collator of your own to the trainer"
_REFERENCE = "remove it: pass the model itself, already loaded, as ref_model to the trainer"
_ADAPTERS = (
    "remove it: with a PEFT model the reference is a frozen copy of its adapter, or the base model"
)

REMEDIES = {
    "use_liger_loss": _LOGITS
    + ". For Liger's layer kernels set use_liger_kernel=True, or better the Hub's with "
    'model_init_kwargs={"use_kernels": True}',
    "use_liger": 'use use_liger_kernel=True, or better model_init_kwargs={"use_kernels": True}',
    "use_logits_to_keep": _LOGITS,
    "use_num_logits_to_keep": _LOGITS,
    "max_prompt_length": "filter or shorten overlong prompts in the dataset. max_length, where the "
    "config has it, cuts prompt and completion together; max_completion_length, where the config "
    "has it, limits what is generated",
    "max_completion_length": "use max_length, which cuts prompt and completion together",
    "max_seq_length": "use max_length",
    "max_target_length": "use max_length, which cuts prompt and completion together",
    "label_pad_token_id": _COLLATOR,
    "padding_value": _COLLATOR,
    "is_encoder_decoder": "remove it: encoder-decoder models are no longer supported by TRL",
    "generate_during_eval": "generate in a TrainerCallback (on_evaluate)",
    "rpo_alpha": 'use loss_type=["sigmoid", "sft"] with loss_weights=[1.0, rpo_alpha]',
    "reference_free": "use trl.experimental.cpo, whose losses need no reference model",
    "force_use_ref_model": "remove it: a ref_model that is passed is always used",
    "ref_model_init_kwargs": _REFERENCE,
    "model_adapter_name": _ADAPTERS,
    "ref_adapter_name": _ADAPTERS,
    "base_model_attribute_name": "remove it: the backbone is found by inspection",
    "tools": 'put the tools into a "tools" column of the dataset',
    "dataset_batch_size": "remove it, or tokenize the dataset yourself",
    "num_of_sequences": "remove it: packing takes the whole dataset",
    "chars_per_token": "remove it: packing counts tokens",
    "wandb_log_unique_prompts": "use log_unique_prompts",
    "vllm_guided_decoding_regex": "use vllm_structured_outputs_regex",
    "vllm_max_model_len": "use vllm_max_model_length",
    "vllm_device": 'use vllm_mode ("server" or "colocate")',
    "vllm_dtype": "remove it: vLLM runs in the dtype of the model",
    "vllm_enable_prefix_caching": "remove it: vLLM caches prefixes by default",
    "evaluation_strategy": "use eval_strategy",
    "no_cuda": "use use_cpu",
    "use_mps_device": "remove it: mps is used where it is there",
    "warmup_ratio": "use warmup_steps, where a number below 1 is a share of all steps",
    "save_safetensors": "remove it: models are always saved as safetensors",
    "overwrite_output_dir": "remove it: output_dir is written into as it is",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "group_by_length": 'use train_sampling_strategy="group_by_length"',
}


@dataclass
class TrainerConfig(MemoryConfig):
    """What comes first in the bases of every config of lowpeak_trainers.

    `padding_free` takes the place of TRL's option of that name, which SFT alone honours;
    `share_prompts` goes with it.

    Raises TypeError, naming what to write instead, for an option that older versions of TRL or
    transformers had and the config no longer has.
    """

    padding_free: bool | None = field(
        default=None,
        metadata={
            "help": "Compute padded batches without their padding, as documents of one packed row; "
            "losses and metrics stay the same. None does so where the model's attention keeps "
            "documents apart without a mask ('lowpeak', flash attention). The environment variable "
            "LOWPEAK_DISABLE=padding_free is the same as False."
        },
    )
    share_prompts: bool = field(
        default=False,
        metadata={
            "help": "Compute once what the sequences of a batch begin with alike: the prompt of a "
            "DPO pair, of a GRPO or RLOO group. Exact, gradients included. Needs padding-free "
            "batches and attention 'lowpeak', and raises where a model cannot have them."
        },
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # The check is no __init__, since @dataclass gives each config, a user's too, one of its own
        parameters = inspect.signature(cls.__init__).parameters.values()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        gone = sorted(kwargs.keys() & REMEDIES.keys() - {p.name for p in parameters})
        if gone and not open_ended:
            remedies = "; ".join(f"{name}={kwargs[name]!r}: {REMEDIES[name]}" for name in gone)
            raise TypeError(f"{cls.__name__} no longer has {', '.join(gone)}. {remedies}.")
        return super().__new__(cls)
