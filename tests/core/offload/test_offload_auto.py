"""The automatic policy: what it moves, when it moves nothing, and that it says why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak.offload import OffloadActivations, SimEngine

SHAPE = (16, 16)
BYTES = 16 * 16 * 4


class MeasuredEngine(SimEngine):
    """A simulated device whose allocator reports the peak that a test names."""

    def __init__(self) -> None:
        super().__init__(mode="eager")
        self.peak = 0
        self.allocated = 0

    def peak_bytes(self, device: torch.device) -> int:
        return self.peak

    def allocated_bytes(self, device: torch.device) -> int:
        return self.allocated


def auto(engine: SimEngine, window_bytes: int = 2 * BYTES) -> OffloadActivations:
    return OffloadActivations(min_bytes=BYTES, window_bytes=window_bytes, device_backend=engine)


def forward(*, checkpointed: bool, length: int = 8) -> Tensor:
    x = torch.randn(SHAPE, requires_grad=True) * 1
    for _ in range(length):
        x = checkpoint(torch.sin, x, use_reentrant=False) if checkpointed else x.sin()
    return x.sum()


def step(context: OffloadActivations, *, checkpointed: bool = True, length: int = 8) -> int:
    """One forward and backward; the number of copies to the host."""
    before = context.stats().copied_out.count
    with context:
        loss = forward(checkpointed=checkpointed, length=length)
    loss.backward()
    return context.stats().copied_out.count - before


@pytest.mark.parametrize(
    ("checkpointed", "chosen"),
    [
        (True, "on for checkpoint inputs (checkpointing is on)"),
        (False, "on for all large saved tensors (no checkpointing)"),
    ],
)
def test_it_is_on_where_more_is_saved_than_the_window_holds(
    checkpointed: bool, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = auto(SimEngine(mode="eager"))
    with caplog.at_level(logging.INFO, "lowpeak.offload"):
        for _ in range(3):
            assert step(context, checkpointed=checkpointed) == 7
    assert [record.getMessage() for record in caplog.records] == [f"activation offload {chosen}"]
    assert context.explain().startswith(chosen.capitalize())


def test_r32_it_is_off_where_the_window_holds_all(caplog: pytest.LogCaptureFixture) -> None:
    context = auto(SimEngine(), window_bytes=1 << 20)
    with caplog.at_level(logging.INFO, "lowpeak.offload"):
        for _ in range(3):
            assert step(context) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"activation offload off: {8 * BYTES} bytes of checkpoint"
    )
    assert "off: " in context.explain().lower()


def test_plain_saves_around_checkpoints_stay() -> None:
    context = auto(SimEngine(mode="eager"))
    for _ in range(2):
        with context:
            loss = forward(checkpointed=True) + forward(checkpointed=False)
        loss.backward()
    assert context.stats().kept["policy"].count == 16


def test_it_goes_off_where_the_peak_is_elsewhere() -> None:
    """An optimizer step far above the forward and backward: the copies lowered nothing."""
    engine = MeasuredEngine()
    context = auto(engine)
    engine.peak = 1000
    assert step(context) == 7
    engine.peak = 1000 + 8 * BYTES
    assert step(context) == 0
    assert "outside of forward and backward" in context.explain()
    assert step(context) == 0
    # A longer forward saves more than was found useless: on again.
    assert step(context, length=12) == 11
    assert context.explain().startswith("On for checkpoint inputs")


def test_it_stays_on_where_the_peak_may_be_within() -> None:
    engine = MeasuredEngine()
    context = auto(engine)
    engine.peak = 1000
    assert step(context) == 7
    engine.peak = 1000 + 7 * BYTES - 1
    for _ in range(3):
        assert step(context) == 7


def test_states_that_the_first_step_makes_count() -> None:
    """The first forward and backward ran without the optimizer's states, the next ones do not."""
    engine = MeasuredEngine()
    context = auto(engine)
    engine.peak = 1000
    assert step(context) == 7
    engine.peak = 1000 + 8 * BYTES
    engine.allocated = BYTES + 1
    assert step(context) == 7


def test_checkpointing_may_be_switched() -> None:
    context = auto(SimEngine(mode="eager"))
    assert step(context, checkpointed=False) == 7
    assert step(context, checkpointed=True) == 7
    assert context.explain().startswith("On for checkpoint inputs")
    # The first forward without checkpoints tells that there are none, the second acts on it.
    step(context, checkpointed=False)
    assert step(context, checkpointed=False) == 7
    with torch.no_grad(), context:
        forward(checkpointed=False)
    assert step(context, checkpointed=False) == 7
