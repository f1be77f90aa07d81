"""The configs are TRL's and MemoryConfig in one: positional, serialisable, on the command line."""

from __future__ import annotations

import dataclasses
import json

import parity
import pytest
import tiny
import torch
import trl
from transformers import HfArgumentParser, TrainingArguments

import lowpeak_trainers
from lowpeak import MemoryConfig

CONFIGS = {
    lowpeak_trainers.SFTConfig: trl.SFTConfig,
    lowpeak_trainers.DPOConfig: trl.DPOConfig,
    lowpeak_trainers.KTOConfig: trl.KTOConfig,
    lowpeak_trainers.GRPOConfig: trl.GRPOConfig,
    lowpeak_trainers.RLOOConfig: trl.RLOOConfig,
    lowpeak_trainers.DistillationConfig: trl.DistillationConfig,
    lowpeak_trainers.RewardConfig: trl.RewardConfig,
}
# What a config has beyond those of all.
FURTHER = {
    config: ["max_tokens_per_batch"]
    for config in CONFIGS
    if config is not lowpeak_trainers.SFTConfig
}
for config in (lowpeak_trainers.GRPOConfig, lowpeak_trainers.RLOOConfig):
    FURTHER[config].append("activation_offloading")
FURTHER[lowpeak_trainers.DistillationConfig] += ["activation_offloading", "shared_vocabulary"]
PARSERS = {"trl": trl.TrlParser, "transformers": HfArgumentParser}
OURS = [field.name for field in dataclasses.fields(lowpeak_trainers.removed_options.TrainerConfig)]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)


@each_config
def test_fields_are_those_of_trl_then_ours(config):
    theirs = [field.name for field in dataclasses.fields(CONFIGS[config])]
    ours = [name for name in OURS if name not in theirs] + FURTHER.get(config, [])
    assert [field.name for field in dataclasses.fields(config)] == theirs + ours
    assert issubclass(config, MemoryConfig)
    assert issubclass(config, CONFIGS[config])


@each_config
def test_defaults_are_those_of_trl(config, tmp_path):
    ours, theirs = (kind(str(tmp_path), bf16=False) for kind in (config, CONFIGS[config]))
    different = {
        field.name
        for field in dataclasses.fields(theirs)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    }
    # Plugins and the like are compared by identity; padding_free is None for TRL's False.
    assert different <= {"distributed_state", "deepspeed_plugin", "padding_free"}
    # what lowpeak may decide is None, what it never does unasked is off
    assert all(getattr(ours, name) is None for name in OURS if name != "share_prompts")
    assert ours.share_prompts is False
    assert ours.activation_offloading is False
    assert ours.gradient_checkpointing


@pytest.mark.parametrize("parser", PARSERS)
@each_config
def test_command_line(config, parser, tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--learning_rate", "0.25", "--bf16", "false"]
    memory = ["--fused_lm_head", "false", "--lm_head_scratch_bytes", "4096"]
    (parsed,) = PARSERS[parser](config).parse_args_into_dataclasses(arguments + memory)
    assert type(parsed) is config
    assert parsed.learning_rate == 0.25
    assert parsed.fused_lm_head is False
    assert parsed.lm_head_scratch_bytes == 4096
    (parsed,) = PARSERS[parser](config).parse_args_into_dataclasses(arguments)
    assert parsed.fused_lm_head is None
    assert parsed.lm_head_scratch_bytes is None


@each_config
def test_help_and_config_file(config, tmp_path):
    parser = trl.TrlParser(config)
    assert "--lm_head_scratch_bytes" in parser.format_help()
    path = tmp_path / "config.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nfused_lm_head: true\nbf16: false\nlearning_rate: 0.5\n"
    )
    (parsed,) = parser.parse_args_and_config(["--config", str(path)])
    assert parsed.fused_lm_head is True
    assert parsed.learning_rate == 0.5


@each_config
def test_serialised_and_built_again(config, tmp_path):
    args = config(str(tmp_path), bf16=False, fused_lm_head=False, lm_head_scratch_bytes=1 << 20)
    values = json.loads(args.to_json_string())
    assert values["fused_lm_head"] is False
    assert values["lm_head_scratch_bytes"] == 1 << 20
    again = config(**{name: values[name] for name in ("output_dir", "bf16", *OURS)})
    assert [getattr(again, name) for name in OURS] == [getattr(args, name) for name in OURS]
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.to_json_string() == args.to_json_string()


def test_plain_training_arguments_are_converted_by_trl(tmp_path):
    trainer = lowpeak_trainers.SFTTrainer(
        model=tiny.llama(),
        args=TrainingArguments(
            str(tmp_path), report_to="none", use_cpu=parity.settings(tmp_path)["use_cpu"]
        ),
        train_dataset=tiny.documents([5, 9]),
        processing_class=tiny.tokenizer(),
    )
    assert isinstance(trainer.args, trl.SFTConfig)
