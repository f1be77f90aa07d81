"""Machines on which nothing is moved, and what is said there: faked files, a faked driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowpeak.offload import OffloadActivations, context, machine
from lowpeak.offload.engine import NullEngine
from lowpeak.offload.native_engine import NativeEngine
from lowpeak.offload.torch_engine import TorchEngine

WSL2 = "5.15.167.4-microsoft-standard-WSL2\n"


def machine_of(root: Path, release: str, *, dxg: bool) -> Path:
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/osrelease").write_text(release, encoding="utf-8")
    (root / "dev").mkdir()
    if dxg:
        (root / "dev/dxg").touch()
    return root


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whether each of torch's devices is integrated; to be changed by the test."""
    integrated = [0]
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(integrated))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(is_integrated=integrated[index]),
    )
    return integrated


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, gpus: list[int]) -> Any:
    """Lets the context believe that it is on the machine under a folder."""

    def believe(root: Path) -> None:
        def why(device_type: str, *, chosen: bool) -> str | None:
            return machine.why_not_here(device_type, chosen=chosen, root=root)

        monkeypatch.setattr(context, "why_not_here", why)

    return believe


@pytest.mark.parametrize(
    ("release", "dxg", "expected"),
    [
        (WSL2, True, True),
        (WSL2, False, False),  # a container that does not get the GPU
        ("6.8.0-45-generic\n", True, False),
        ("6.8.0-45-generic\n", False, False),
    ],
)
def test_wsl2(tmp_path: Path, release: str, dxg: bool, expected: bool) -> None:
    assert machine.is_wsl2(machine_of(tmp_path, release, dxg=dxg)) == expected


def test_no_linux_is_no_wsl2(tmp_path: Path) -> None:
    assert not machine.is_wsl2(tmp_path)


def test_under_wsl2_a_name_counts_for_more(
    tmp_path: Path, on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    on(machine_of(tmp_path, WSL2, dxg=True))
    caplog.set_level("INFO", "lowpeak.offload")
    offload = OffloadActivations()
    for _ in range(2):
        with offload:
            pass
    (said,) = caplog.messages
    assert said.startswith("activation offload off: Nothing is moved: WSL2")
    assert "device_backend='torch'" in offload.explain()
    assert isinstance(context.choose_engine("torch", use_streams=True), TorchEngine)


@pytest.mark.parametrize("backend", ["auto", "torch", "native"])
def test_integrated_gpus_are_left_alone(
    tmp_path: Path, on: Any, gpus: list[int], backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """unsloth_zoo#928: 1.68 s a step instead of 3.62 s without offload, on unified memory."""
    gpus[:] = [1]
    on(machine_of(tmp_path, "6.8.0-45-generic\n", dxg=False))
    caplog.set_level("INFO", "lowpeak.offload")
    offload = OffloadActivations(device_backend=backend)
    with offload:
        torch.ones(1, requires_grad=True).exp().backward()
    assert "integrated GPU" in offload.explain()
    assert ["integrated GPU" in said for said in caplog.messages] == [True]
    assert offload.stats().saved.count == 0


def test_one_gpu_of_its_own_is_enough(tmp_path: Path, on: Any, gpus: list[int]) -> None:
    gpus[:] = [1, 0]
    on(machine_of(tmp_path, "6.8.0-45-generic\n", dxg=False))
    assert isinstance(context.choose_engine("auto", use_streams=True), TorchEngine)


def test_an_engine_object_is_used_anywhere(tmp_path: Path, on: Any, gpus: list[int]) -> None:
    gpus[:] = [1]
    on(machine_of(tmp_path, WSL2, dxg=True))
    engine = TorchEngine("cuda")
    assert context.choose_engine(engine, use_streams=True) is engine


def test_without_a_device_that_is_the_reason() -> None:
    assert "no device" in NullEngine().reason
    assert "no device" in OffloadActivations(device_backend="null").explain()


def test_the_native_engine_is_not_made_there(
    tmp_path: Path, on: Any, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus[:] = [1]
    on(machine_of(tmp_path, "6.8.0-45-generic\n", dxg=False))
    monkeypatch.setattr(NativeEngine, "__init__", lambda self, **options: pytest.fail("made"))
    assert isinstance(context.choose_engine("native", use_streams=True), NullEngine)
