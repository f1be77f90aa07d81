"""The gate names what it found, what is supported and what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import trl
from trl.trainer import grpo_trainer, sft_trainer
from trl.trainer import utils as trl_utils

import lowpeak_trainers
from lowpeak_trainers.compatibility import check_trl


def check():
    check_trl(lowpeak_trainers.add_fused_lm_head)


@pytest.mark.parametrize("version", ["1.16.0", "1.16.1", "1.17.0.dev0", "1.17.0"])
def test_supported_versions_pass(version, monkeypatch):
    monkeypatch.setattr(trl, "__version__", version)
    check()


@pytest.mark.parametrize("version", ["0.29.0", "1.15.0", "1.16.0.dev0", "2.0.0.dev0", "2.0.0"])
def test_other_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(trl, "__version__", version)
    message = rf"trl {version}: .*not supported.* is trl>=1.16.0,<2 .*pip install 'trl>=1"
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError, match=message):
        check()


def test_missing_and_changed_names_are_reported_together(monkeypatch):
    def changed(model, temperature=1.0, outputs=("log_probs",), chunk_size=None):
        raise AssertionError

    monkeypatch.delattr(sft_trainer, "add_fused_lm_head")
    monkeypatch.setattr(grpo_trainer, "add_fused_lm_head", changed)
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError) as caught:
        check()
    message = str(caught.value)
    assert "trl.trainer.sft_trainer has no add_fused_lm_head" in message
    assert (
        "trl.trainer.grpo_trainer.add_fused_lm_head takes (model, temperature=1.0, out" in message
    )
    assert "dpo_trainer" not in message


def test_missing_class_of_adapters_is_reported(monkeypatch):
    monkeypatch.delattr(grpo_trainer, "BaseTunerLayer")
    with pytest.raises(
        lowpeak_trainers.UnsupportedTrlError, match="grpo_trainer has no BaseTunerLayer"
    ):
        check()


def test_packing_that_is_gone_or_changed_is_reported(monkeypatch):
    def changed(dataset, seq_length, strategy="bfd"):
        raise AssertionError

    monkeypatch.setattr(sft_trainer, "pack_dataset", changed)
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError, match="pack_dataset takes"):
        check()
    monkeypatch.delattr(sft_trainer, "pack_dataset")
    monkeypatch.delattr(sft_trainer.SFTTrainer, "_prepare_dataset")
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError) as caught:
        check()
    assert "sft_trainer has no pack_dataset; SFTTrainer has no _prepare_dataset" in str(
        caught.value
    )


def test_changed_default_is_a_change(monkeypatch):
    def changed(model, temperature=1.0, cast_lm_head_to_fp32=True, outputs=("log_probs",)):
        raise AssertionError

    monkeypatch.setattr(grpo_trainer, "add_fused_lm_head", changed)
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError, match="cast_lm_head_to_fp32=True"):
        check()


def test_unknown_output_field_is_reported(monkeypatch):
    widened = dataclasses.make_dataclass("Widened", [("log_probs", object), ("varentropy", object)])
    monkeypatch.setattr(trl_utils, "FusedCausalLMOutput", widened)
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError, match=r"\['varentropy'\]"):
        check()


def test_the_gate_is_passed_on_import():
    program = "import trl; trl.__version__ = '1.15.0'; import lowpeak_trainers"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("lowpeak_trainers.compatibility.UnsupportedTrlError: ")
    assert "trl 1.15.0" in last
