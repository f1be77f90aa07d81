"""Tiny models go to the device of the test session."""

import pytest
import tiny_models
import torch


@pytest.fixture(autouse=True)
def _models_on_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "DEVICE", device)
