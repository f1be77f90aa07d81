"""What one run is: a trainer, with stock TRL or with lowpeak, and the sizes of its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

TRAINERS = ("sft", "dpo", "grpo")
SIDES = ("trl", "lowpeak")
SIDE_NAMES = {"trl": "TRL", "lowpeak": "lowpeak"}

EVENT_PREFIX = "lowpeak-quickstart "
"""Lines of a run's stdout that begin with this carry one JSON object for the parent."""


@dataclass(frozen=True)
class StepSize:
    """How much one optimizer step trains on; at most `rows * tokens_per_row` tokens."""

    rows: int
    """Sequences in a step: documents, both halves of each pair, or completions."""
    tokens_per_row: int
    """Sequences are cut to this many tokens, prompt included."""
    completion_tokens: int = 0
    """GRPO only: the longest completion that is sampled."""

    @property
    def tokens(self) -> int:
        """The most tokens that one step trains on."""
        return self.rows * self.tokens_per_row


STEP_SIZES = {
    "sft": StepSize(rows=2, tokens_per_row=768),
    "dpo": StepSize(rows=4, tokens_per_row=384),
    "grpo": StepSize(rows=8, tokens_per_row=192, completion_tokens=64),
}


@dataclass(frozen=True)
class RunSettings:
    """One run, as its own process reads it."""

    trainer: str
    """One of TRAINERS."""
    side: str
    """One of SIDES."""
    model: str
    """Folder of a transformers model with its tokenizer and chat template."""
    folder: str
    """Where the run writes `result.json`, and the completions that it records or replays."""
    steps: int
    seed: int
    device: str
    """"cpu", "cuda" or "xpu"."""

    @property
    def size(self) -> StepSize:
        """The size of a step of this trainer."""
        return STEP_SIZES[self.trainer]

    @property
    def precision(self) -> str:
        """float32 on CPU; bf16 autocast over float32 weights, TRL's default, on accelerators."""
        return "float32" if self.device == "cpu" else "bf16"

    @property
    def result_path(self) -> Path:
        """Where the result of the run lies."""
        return Path(self.folder) / f"{self.trainer}-{self.side}.json"

    @property
    def log_path(self) -> Path:
        """Where the run's own messages lie."""
        return self.result_path.with_suffix(".log")

    @property
    def completions_path(self) -> Path:
        """Where GRPO's completions lie, one list of token ids a row, one list of rows a step."""
        return Path(self.folder) / f"{self.trainer}-completions.json"

    def write(self) -> Path:
        """Write the settings beside the result, and return where."""
        path = self.result_path.with_suffix(".settings.json")
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> RunSettings:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
