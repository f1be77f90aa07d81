"""One run of the quickstart in a process of its own: peaks do not mix, memory is returned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lowpeak_bench.quickstart import data
from lowpeak_bench.quickstart.settings import EVENT_PREFIX, RunSettings


def main(settings_path: str) -> None:
    """Train as the settings say and write the result; announce each step on stdout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lowpeak_bench.quickstart.measure import StepRecorder

    settings = RunSettings.read(Path(settings_path))
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    recorder = StepRecorder(
        torch.device(settings.device), lambda step: _announce(settings, f"step {step}")
    )
    trainer, rollouts = build_trainer(settings, model, tokenizer, recorder)
    reference = trainer.ref_model if settings.trainer == "dpo" else None
    recorder.watch([trainer.model] if reference is None else [trainer.model, reference])
    trainer.train()
    result = {
        "trainer": settings.trainer,
        "side": settings.side,
        "precision": settings.precision,
        "steps": recorder.steps,
        "differing_tokens": rollouts.differing_tokens if rollouts is not None else None,
    }
    settings.result_path.write_text(json.dumps(result), encoding="utf-8")


def build_trainer(
    settings: RunSettings, model: Any, tokenizer: Any, recorder: Any
) -> tuple[Any, Any]:
    """Return the trainer, of TRL or of lowpeak, and for GRPO its recorded rollouts."""
    from datasets import Dataset

    side, name = side_module(settings.side), settings.trainer.upper()
    trainer_class, config_class = getattr(side, f"{name}Trainer"), getattr(side, f"{name}Config")
    size, seed = settings.size, settings.seed
    arguments: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    options = common_options(settings)
    rollouts = None
    if settings.trainer == "sft":
        rows = data.sft_rows(size.rows * settings.steps, seed)
        options |= {"per_device_train_batch_size": size.rows, "max_length": size.tokens_per_row}
    elif settings.trainer == "dpo":
        pairs = size.rows // 2
        rows = data.dpo_rows(pairs * settings.steps, seed)
        options |= {"per_device_train_batch_size": pairs, "max_length": size.tokens_per_row}
    else:
        from lowpeak_bench.quickstart.rollouts import RecordedRollouts

        rows = data.grpo_rows(settings.steps, seed)
        rollouts = RecordedRollouts(settings.completions_path, size.completion_tokens, seed)
        arguments |= {"reward_funcs": data.arithmetic_reward, "rollout_func": rollouts}
        options |= {
            "per_device_train_batch_size": size.rows,
            "num_generations": size.rows,
            "max_completion_length": size.completion_tokens,
        }
    arguments |= {"args": config_class(**options), "train_dataset": Dataset.from_list(rows)}
    return trainer_class(**arguments, callbacks=[recorder]), rollouts


def side_module(side: str) -> Any:
    """Return the module whose trainers are used: change the import and nothing else."""
    if side == "trl":
        import trl

        return trl
    import lowpeak_trainers

    return lowpeak_trainers


def common_options(settings: RunSettings) -> dict[str, Any]:
    """Return the options that all trainers share; the rest is as TRL has it."""
    return {
        "output_dir": str(Path(settings.folder) / "trainer"),
        "max_steps": settings.steps,
        "seed": settings.seed,
        "use_cpu": settings.device == "cpu",
        "bf16": settings.precision == "bf16",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": settings.device != "cpu",
    }


def _announce(settings: RunSettings, text: str) -> None:
    event = {"trainer": settings.trainer, "side": settings.side, "event": text}
    sys.stdout.write(f"\n{EVENT_PREFIX}{json.dumps(event)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
