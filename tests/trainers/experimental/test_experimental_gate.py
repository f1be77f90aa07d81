"""The gate in front of `trl.experimental`, and when that is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import recipes
from trl.experimental.orpo import ORPOTrainer

import lowpeak_trainers
import lowpeak_trainers.experimental
from lowpeak_trainers.compatibility import EXPERIMENTAL_METHODS, check_experimental


@pytest.mark.parametrize("name", EXPERIMENTAL_METHODS)
def test_installed_trl_passes(name):
    check_experimental(name)


def test_changed_and_missing_names_are_reported_together(monkeypatch):
    def changed(self, model):
        raise AssertionError

    monkeypatch.setattr(ORPOTrainer, "concatenated_forward", changed)
    monkeypatch.delattr(ORPOTrainer, "concatenated_inputs")
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError) as caught:
        check_experimental("orpo")
    message = str(caught.value)
    assert "ORPOTrainer.concatenated_forward takes (self, model), not (self, model, b" in message
    assert "ORPOTrainer has no concatenated_inputs" in message
    assert "upgrade lowpeak-trainers" in message


def test_module_that_is_gone(monkeypatch):
    monkeypatch.setitem(EXPERIMENTAL_METHODS, "gone", {})
    with pytest.raises(lowpeak_trainers.UnsupportedTrlError, match=r"no trl\.experimental\.gone"):
        check_experimental("gone")


def test_names_are_those_of_the_modules():
    names = [f"{m}{kind}" for m in recipes.METHODS for kind in ("Config", "Trainer")]
    assert sorted(lowpeak_trainers.experimental.__all__) == sorted(names)
    for method in recipes.METHODS:
        for kind in ("Config", "Trainer"):
            found = getattr(lowpeak_trainers.experimental, f"{method}{kind}")
            assert found is getattr(recipes.module("lowpeak_trainers", method), f"{method}{kind}")
    with pytest.raises(AttributeError, match="has no attribute 'BCOTrainer'"):
        lowpeak_trainers.experimental.BCOTrainer  # noqa: B018


@pytest.mark.slow  # it imports TRL anew
def test_each_module_is_imported_when_it_is_asked_for():
    program = (
        "import sys, lowpeak_trainers.experimental\n"
        "assert 'trl.experimental.orpo' not in sys.modules\n"
        "from lowpeak_trainers.experimental import ORPOTrainer\n"
        "assert 'trl.experimental.orpo' in sys.modules\n"
        "assert 'trl.experimental.online_dpo' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
