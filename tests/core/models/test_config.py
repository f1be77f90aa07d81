"""MemoryConfig as a mixin, on a command line, in JSON; the environment variable."""

import dataclasses
import json
import subprocess
import sys

import pytest
from transformers import HfArgumentParser, TrainingArguments

from lowpeak import MemoryConfig
from lowpeak.config import disabled_techniques, technique_enabled


@dataclasses.dataclass
class MixedArguments(MemoryConfig, TrainingArguments):
    """As a user writes it."""


def test_mixin_parses_its_own_and_the_other_fields(tmp_path: str) -> None:
    (parsed,) = HfArgumentParser(MixedArguments).parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            "--fused_lm_head",
            "false",
            "--lm_head_scratch_bytes",
            "1000",
            "--learning_rate",
            "0.25",
        ]
    )
    assert (parsed.fused_lm_head, parsed.lm_head_scratch_bytes) == (False, 1000)
    assert MixedArguments(output_dir=str(tmp_path)).fused_lm_head is None
    assert parsed.learning_rate == 0.25
    written = json.loads(parsed.to_json_string())
    assert written["fused_lm_head"] is False
    assert written["lm_head_scratch_bytes"] == 1000


# trl 1.16 sets a field by the name that transformers 5.24 deprecates.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_mixin_in_front_of_trl() -> None:
    trl = pytest.importorskip("trl")

    @dataclasses.dataclass
    class SFTConfig(MemoryConfig, trl.SFTConfig):
        pass

    memory_names = {field.name for field in dataclasses.fields(MemoryConfig)}
    for config in (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.RewardConfig):
        assert memory_names.isdisjoint(field.name for field in dataclasses.fields(config))
    (parsed,) = trl.TrlParser(SFTConfig).parse_args_and_config(
        [
            "--lm_head_scratch_bytes",
            "5",
            "--max_length",
            "77",
            "--use_cpu",
            "true",
            "--bf16",
            "false",
        ]
    )
    assert parsed.lm_head_scratch_bytes == 5
    assert parsed.max_length == 77
    assert parsed.fused_lm_head is None


def test_every_field_has_a_help_text_and_goes_through_json() -> None:
    config = MemoryConfig(fused_lm_head=True, lm_head_scratch_bytes=5)
    assert MemoryConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    for field in dataclasses.fields(MemoryConfig):
        assert field.default is None
        assert field.metadata["help"]


@pytest.mark.parametrize("value", [0, -1])
def test_scratch_bytes_must_be_positive(value: int) -> None:
    with pytest.raises(ValueError, match=f"lm_head_scratch_bytes={value}"):
        MemoryConfig(lm_head_scratch_bytes=value).validate_memory_config()


def test_disable_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWPEAK_DISABLE", raising=False)
    assert disabled_techniques() == frozenset()
    assert technique_enabled("head", None)
    assert technique_enabled("head", True)
    assert not technique_enabled("head", False)
    monkeypatch.setenv("LOWPEAK_DISABLE", " head , ")
    assert disabled_techniques() == {"head"}
    assert not technique_enabled("head", True)
    monkeypatch.setenv("LOWPEAK_DISABLE", "head,heads")
    with pytest.raises(ValueError, match=r"names heads, which lowpeak does not know: .* head"):
        disabled_techniques()


def test_the_config_needs_no_transformers() -> None:
    program = (
        "import sys, lowpeak; lowpeak.MemoryConfig();"
        "sys.exit(any(m in sys.modules for m in ('transformers', 'trl', 'triton')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
