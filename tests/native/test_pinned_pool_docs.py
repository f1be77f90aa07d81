"""The examples of docs/pinned-pool.md, run as they stand there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowpeak import native

pytestmark = pytest.mark.skipif(
    not native.native_available() or sys.platform != "linux",
    reason="lowpeak._native was not built here",
)
PAGE = Path(__file__).parents[2] / "docs" / "pinned-pool.md"


@pytest.fixture
def example() -> dict[str, Any]:
    """The names that the page defines, over a pool with small segments."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    short, count = re.subn(
        r"PinnedPool\(\s*limit_bytes", "PinnedPool(segment_bytes=2**23, limit_bytes", code
    )
    assert count == 1
    names: dict[str, Any] = {}
    exec(compile(short, str(PAGE), "exec"), names)
    return names


def test_batches_arrive_whole_and_their_memory_returns(
    example: dict[str, Any], device: torch.device
) -> None:
    batches = [
        {"input_ids": torch.arange(n, n + 4096), "weights": torch.full((n, 7), float(n))}
        for n in range(1, 40)
    ]
    count = 0
    for expected, batch in zip(batches, example["on_device"](iter(batches), device), strict=True):
        for name, value in expected.items():
            assert batch[name].device.type == device.type
            assert torch.equal(batch[name].cpu(), value)
        count += 1
        del batch
    assert count == 39
    stats = example["pool"].stats()
    assert stats.live_bytes == 0
    assert stats.growths == 1


@pytest.mark.parametrize("amsgrad", [False, True])
def test_states_on_the_host_change_no_bit(
    example: dict[str, Any], device: torch.device, amsgrad: bool
) -> None:
    def trained(on_host: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Linear(33, 65), torch.nn.ReLU(), torch.nn.Linear(65, 3)
        )
        model = layers.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=amsgrad)
        stepper = example["HostStates"](optimizer) if on_host else optimizer
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 33).to(device)).square().mean().backward()
            stepper.step()
            if on_host:
                moments = [s[n] for s in optimizer.state.values() for n in s if n != "step"]
                assert {moment.device.type for moment in moments} == {"cpu"}
        return [parameter.detach().cpu() for parameter in model.parameters()]

    plain = trained(on_host=False)
    hosted = trained(on_host=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, hosted, strict=True))
    numbers = sum(parameter.numel() for parameter in plain)
    assert example["pool"].stats().peak_live_bytes == numbers * 4 * (3 if amsgrad else 2)
