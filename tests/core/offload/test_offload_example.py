"""The example of docs/offload.md runs, moves what it says, and trains as without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "offload.md"
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
CALL = "OffloadActivations("


def run(backend: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    text = EXAMPLE.replace(CALL, f'{CALL}device_backend="{backend}", policy=')
    text = text.replace('if torch.cuda.is_available() else "cpu"', 'if False else "cpu"')
    exec(compile(text, str(GUIDE), "exec"), {"__name__": "example"})
    return capsys.readouterr().out.splitlines()


def test_the_example_trains_as_without_offload(capsys: pytest.CaptureFixture[str]) -> None:
    *losses, explanation = run("sim", capsys)
    *plain, _ = run("null", capsys)
    assert losses == plain
    assert len(losses) == 4
    assert "Every large saved tensor is moved, as asked for" in explanation
    assert " 0 tensors (0 bytes) were copied to the host" not in explanation
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 30
