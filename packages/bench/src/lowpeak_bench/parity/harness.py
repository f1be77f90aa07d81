"""Two runs that must log the same numbers, and what is needed to let them.

A run is 5 optimizer steps; compared is every number that the trainer logs, but for times.
Completions of online trainers are replayed from a record, so that both runs score the same tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from trl.trainer import utils as trl_utils

import lowpeak.models

# Relative to max(1, |value|). A GPU sums in other orders from run to run: on an H200 one of 70 rows
# of the table came to 1.2e-5 after 5 steps.
TOLERANCE = 3e-5 if torch.cuda.is_available() else 1e-5
STEPS = 5
TIMES = ("runtime", "per_second", "step_time", "total_flos", "profiling/")

Trainer = Any  # TRL's trainers have no types
Logs = list[dict[str, float | None]]


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Arguments that make a run short, quiet, in float32 and logged at every step."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not (torch.cuda.is_available() or torch.xpu.is_available()),
        "dataloader_pin_memory": False,
        **overrides,
    }


class CompletionRecord:
    """Records what `model.generate` returns in one run and plays it back in another.

    The random state after sampling belongs to the record: GRPO shuffles its micro-batches by it.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def record(self, trainer: Trainer) -> None:
        """Remember every output of the trainer's model from now on."""
        generate = trainer.model.generate

        @functools.wraps(generate)
        def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = generate(*args, **kwargs)
            self._outputs.append((output.clone(), random_states()))
            return output

        trainer.model.generate = recording

    def replay(self, trainer: Trainer) -> None:
        """Let the trainer's model return the recorded outputs, and check that the prompts agree."""
        remaining = iter(self._outputs)

        @functools.wraps(trainer.model.generate)
        def replaying(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            output, states = next(remaining)
            torch.set_rng_state(states[0])
            torch.cuda.set_rng_state_all(states[1:])
            assert torch.equal(output[:, : input_ids.shape[1]], input_ids)
            return output.clone()

        trainer.model.generate = replaying


def random_states() -> list[torch.Tensor]:
    """States of the CPU's generator and of each GPU's: sampling moves them, a replay does not."""
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def script_completions(trainer: Trainer, completions: list[list[int]], pad: int) -> None:
    """Let the trainer's model "generate" these completions, the same ones at every call."""
    width = max(len(ids) for ids in completions)
    rows = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in completions])

    @functools.wraps(trainer.model.generate)
    def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.cat([input_ids, rows.to(input_ids.device)], dim=1)

    trainer.model.generate = generate


def has_lowpeak_head(trainer: Trainer) -> bool:
    """Whose output a fused call of the trainer's model returns: lowpeak's, or TRL's."""
    ids = torch.tensor([[7, 8, 9]], device=trainer.model.device)
    with torch.no_grad():
        output = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert isinstance(output, lowpeak.models.FusedCausalLMOutput | trl_utils.FusedCausalLMOutput)
    return isinstance(output, lowpeak.models.FusedCausalLMOutput)


def note_packed_rows(trainer: Trainer, notes: list[bool]) -> None:
    """Note of every call of the backbone of the trainer's model whether it is a packed row."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if is_peft_model(model) else model

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        notes.append(kwargs.get("cu_seq_lens_q") is not None)

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)


def logged(trainer: Trainer) -> Logs:
    """All that the trainer logged, but for times."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in trainer.state.log_history
    ]


@dataclass(frozen=True)
class Deviation:
    """One logged number of both runs."""

    name: str
    step: int
    ours: float
    stock: float

    @property
    def error(self) -> float:
        """|ours - stock| / max(1, |stock|); nan where either is not finite."""
        return abs(self.ours - self.stock) / max(1.0, abs(self.stock))

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {self.ours} and {self.stock}"


def deviations(ours: Logs, stock: Logs) -> Iterator[Deviation]:
    """Every number in both logs. TRL logs None for the extreme of nothing: then both must.

    Raises:
        ValueError: when the two have logged different things.
    """
    if len(ours) != len(stock) or len(stock) < 2:
        raise ValueError(f"logged {len(ours)} and {len(stock)} times")
    for a, b in zip(ours, stock, strict=True):
        if a.keys() != b.keys():
            raise ValueError(f"only one of both logged {sorted(a.keys() ^ b.keys())}")
        for name, right in b.items():
            found = a[name]
            if found is None and right is None:
                continue
            if found is None or right is None:
                raise ValueError(f"{name} is {found} and {right}")
            yield Deviation(name, int(b["step"] or 0), found, right)


def assert_same_logs(ours: Trainer, stock: Trainer, tolerance: float = TOLERANCE) -> None:
    """|a - b| <= tolerance * max(1, |b|) for every logged number, and the same names logged."""
    for deviation in deviations(logged(ours), logged(stock)):
        assert math.isfinite(deviation.stock), f"{deviation}: nothing compared"
        assert deviation.error <= tolerance, str(deviation)


def train_both(
    stock: Callable[[], Trainer], ours: Callable[[], Trainer], *, online: bool = False
) -> tuple[Trainer, Trainer]:
    """Train both, the completions of the second replayed from the first if `online`."""
    record = CompletionRecord()
    stock_trainer = stock()
    if online:
        record.record(stock_trainer)
    stock_trainer.train()
    our_trainer = ours()
    if online:
        record.replay(our_trainer)
    our_trainer.train()
    return stock_trainer, our_trainer
