"""The gate in front of TRL: every name that lowpeak replaces is checked once, on import."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import trl
from packaging.specifiers import SpecifierSet

from lowpeak.models import FusedCausalLMOutput

SUPPORTED_TRL = ">=1.16.0,<2"
HEAD_NAME = "add_fused_lm_head"
# By it TRL tells a head with an adapter. Its modules have it where peft is installed.
TUNER_NAME = "BaseTunerLayer"
PACK_NAME = "pack_dataset"
PACKING_MODULE = "trl.trainer.sft_trainer"
_PACK_PARAMETERS = "dataset, seq_length, strategy='bfd', map_kwargs=None"
SEAM_MODULES = (
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
)
# Its loss is overridden. Its model has two heads to compare, so it never asks for one.
DISTILLATION_MODULE = "trl.trainer.distillation_trainer"
# Its model scores a sequence with one number: there is no language model head.
REWARD_MODULE = "trl.trainer.reward_trainer"
# What `enabled()` reaches.
TRAINER_CLASSES = {
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.dpo_trainer": "DPOTrainer",
    "trl.trainer.kto_trainer": "KTOTrainer",
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
    "trl.trainer.reward_trainer": "RewardTrainer",
}
# Those that drop rows while they prepare a dataset, and the parameters of that method.
PREPARE_NAME = "_prepare_dataset"
_PREPARE_PARAMETERS = "self, dataset, processing_class, args, dataset_name"
PREPARING_MODULES = {
    "trl.trainer.sft_trainer": "self, dataset, processing_class, args, packing, formatting_func, "
    "dataset_name",
    "trl.trainer.dpo_trainer": _PREPARE_PARAMETERS,
    "trl.trainer.kto_trainer": _PREPARE_PARAMETERS,
    REWARD_MODULE: _PREPARE_PARAMETERS,
}
# What lowpeak overrides in the trainer of DISTILLATION_MODULE, or calls, and its parameters.
DISTILLATION_METHODS = {
    "_compute_loss": "self, unwrapped_student, inputs, num_items_in_batch",
    "__init__": "self, model, teacher_model=None, args=None",
}
_PAIRS = {
    "concatenated_forward": "self, model, batch",
    "concatenated_inputs": "batch, is_encoder_decoder=False, padding_value=0, device=None",
}
_DIVERGENCE = {
    "compute_loss": "self, model, inputs, return_outputs=False, num_items_in_batch=None",
    "generalized_jsd_loss": "student_logits, teacher_logits, labels=None, beta=0.5",
}
# What lowpeak overrides, or calls, of the trainers in the modules of `trl.experimental`.
EXPERIMENTAL_METHODS = {
    "a2po": {
        "A2POTrainer": {
            "_get_sequence_logps": "self, model, input_ids, attention_mask, logits_to_keep"
        }
    },
    "cpo": {"CPOTrainer": _PAIRS},
    "gkd": {"GKDTrainer": _DIVERGENCE},
    "gmpo": {"GMPOTrainer": {"_get_per_token_logps_and_entropies": "self, model, input_ids"}},
    "gold": {"GOLDTrainer": {**_DIVERGENCE, "_get_model_forward_kwargs": "self, inputs"}},
    "online_dpo": {
        "OnlineDPOTrainer": {
            "_forward": "self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, "
            "vision_inputs=None",
            "_enable_gradient_checkpointing": "self, model, args",
        }
    },
    "orpo": {"ORPOTrainer": _PAIRS},
    "tpo": {"TPOTrainer": {"_compute_loss": "self, model, inputs, return_outputs"}},
}


class UnsupportedTrlError(ImportError):
    """The installed TRL is not one that lowpeak_trainers can plug into."""


def check_trl(replacement: Callable[..., Any]) -> None:
    """Raise UnsupportedTrlError unless the installed TRL has the seam that `replacement` fits.

    Checked are the version, `add_fused_lm_head` in each of SEAM_MODULES with the parameters and
    defaults of `replacement`, PEFT's `BaseTunerLayer` there, `pack_dataset`, the names in
    TRAINER_CLASSES, the fields of TRL's fused output, and the methods of its trainers that lowpeak
    overrides. All faults come in one error.
    """
    if not SpecifierSet(SUPPORTED_TRL).contains(trl.__version__, prereleases=True):
        raise _unsupported(["its version is not supported"])
    faults = [
        fault
        for name in SEAM_MODULES
        for fault in _module_faults(importlib.import_module(name), replacement)
    ]
    faults += [
        fault
        for name in (*SEAM_MODULES, DISTILLATION_MODULE)
        for fault in _tuner_faults(importlib.import_module(name))
    ]
    faults += [
        f"{name} has no {trainer}"
        for name, trainer in TRAINER_CLASSES.items()
        if trainer not in vars(importlib.import_module(name))
    ]
    faults += _pack_faults(importlib.import_module(PACKING_MODULE))
    for name, parameters in PREPARING_MODULES.items():
        faults += _method_faults(
            importlib.import_module(name), TRAINER_CLASSES[name], {PREPARE_NAME: parameters}
        )
    faults += _output_faults(importlib.import_module("trl.trainer.utils"))
    faults += _method_faults(
        importlib.import_module(DISTILLATION_MODULE), "DistillationTrainer", DISTILLATION_METHODS
    )
    if faults:
        raise _unsupported(faults)


def check_experimental(name: str) -> None:
    """Raise UnsupportedTrlError unless the module `name` of `trl.experimental` is as lowpeak needs.

    Asked where that module is about to be imported: `import lowpeak_trainers` imports none of them.
    """
    full = f"trl.experimental.{name}"
    if importlib.util.find_spec(full) is None:
        raise _unsupported([f"there is no {full}"])
    module = importlib.import_module(full)
    faults = [
        fault
        for trainer, methods in EXPERIMENTAL_METHODS[name].items()
        for fault in _method_faults(module, trainer, methods)
    ]
    if faults:
        raise _unsupported(faults)


def _module_faults(module: ModuleType, replacement: Callable[..., Any]) -> list[str]:
    stock = vars(module).get(HEAD_NAME)
    if stock is None:
        return [f"{module.__name__} has no {HEAD_NAME}"]
    found, wanted = _parameters(stock), _parameters(replacement)
    if found != wanted:
        return [f"{module.__name__}.{HEAD_NAME} takes ({found}), not ({wanted})"]
    return []


def _pack_faults(module: ModuleType) -> list[str]:
    stock = vars(module).get(PACK_NAME)
    if stock is None:
        return [f"{module.__name__} has no {PACK_NAME}"]
    found = _parameters(stock)
    if found == _PACK_PARAMETERS:
        return []
    return [f"{module.__name__}.{PACK_NAME} takes ({found}), not ({_PACK_PARAMETERS})"]


def _tuner_faults(module: ModuleType) -> list[str]:
    if importlib.util.find_spec("peft") is None or TUNER_NAME in vars(module):
        return []
    return [f"{module.__name__} has no {TUNER_NAME}"]


def _output_faults(utils: ModuleType) -> list[str]:
    theirs = vars(utils).get("FusedCausalLMOutput")
    if theirs is None:
        return [f"{utils.__name__} has no FusedCausalLMOutput"]
    ours = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    unknown = sorted({field.name for field in dataclasses.fields(theirs)} - ours)
    return [f"FusedCausalLMOutput has fields unknown to lowpeak: {unknown}"] if unknown else []


def _method_faults(module: ModuleType, name: str, methods: Mapping[str, str]) -> list[str]:
    trainer = vars(module).get(name)
    if trainer is None:
        return [f"{module.__name__} has no {name}"]
    faults = []
    for method_name, wanted in methods.items():
        method = getattr(trainer, method_name, None)
        found = None if method is None else _parameters(method)
        if found is None:
            faults.append(f"{name} has no {method_name}")
        elif not f"{found}, ".startswith(f"{wanted}, "):
            faults.append(f"{name}.{method_name} takes ({found}), not ({wanted})")
    return faults


def _parameters(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters
    )


def _unsupported(faults: Sequence[str]) -> UnsupportedTrlError:
    return UnsupportedTrlError(
        f"lowpeak_trainers cannot plug into trl {trl.__version__}: {'; '.join(faults)}. Supported "
        f"is trl{SUPPORTED_TRL} with the names of 1.16. Install such a version "
        f"(pip install 'trl{SUPPORTED_TRL}'), or upgrade lowpeak-trainers."
    )
