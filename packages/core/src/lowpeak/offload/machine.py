"""Machines on which nothing is gained by moving activations to the host."""

from pathlib import Path

import torch


def why_not_here(device_type: str, *, chosen: bool, root: Path = Path("/")) -> str | None:
    """Why a machine's devices of this type are left alone; None where they are not.

    Integrated GPUs use the host's memory: whatever is moved stays where it was, and is copied twice
    (asked of CUDA and ROCm; torch 2.11 does not tell it of XPU). WSL2 lets processes pin little
    memory; there `chosen`, a backend that the user named, counts for more. `root` is put before
    "/proc" and "/dev".
    """
    if device_type == "cuda" and all_integrated():
        return "the device's memory is the host's (integrated GPU), so that nothing would be freed"
    if not chosen and is_wsl2(root):
        return (
            "WSL2 lets a process pin little host memory; device_backend='torch' or 'native' moves "
            "activations all the same"
        )
    return None


def all_integrated() -> bool:
    """Whether each of torch's CUDA or ROCm devices shares the host's memory."""
    devices = range(torch.cuda.device_count())
    return bool(devices) and all(
        torch.cuda.get_device_properties(index).is_integrated for index in devices
    )


def is_wsl2(root: Path) -> bool:
    """Whether Linux runs as a guest of Windows, with its GPU behind /dev/dxg."""
    release = root / "proc/sys/kernel/osrelease"
    if not release.exists() or not (root / "dev/dxg").exists():
        return False
    return "microsoft" in release.read_text(encoding="utf-8").lower()
