"""The environment block that goes with every published figure."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

Environment = dict[str, str | int | None]

PACKAGES = (
    "lowpeak-core",
    "lowpeak-trainers",
    "lowpeak-bench",
    "torch",
    "triton",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "liger-kernel",
    "cut-cross-entropy",
)


def package_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def environment() -> Environment:
    """Describe machine, device and versions: everything one needs to read a figure.

    Holds no host name, user name or path, so that it can be published as it is. What is not
    installed or not there is None.
    """
    block: Environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "git_commit": git_commit(),
    }
    block.update(_device())
    block.update({name: package_version(name) for name in PACKAGES})
    return block


def git_commit() -> str | None:
    """Return the commit of the checkout this file lies in, with "+changes" if it was modified."""
    folder = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changes else commit


def _device() -> Environment:
    if not torch.cuda.is_available():
        return {"device": "cpu", "device_memory_bytes": None, "driver": None, "cuda": None}
    properties = torch.cuda.get_device_properties(0)
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "driver": _output(*query),
        "cuda": torch.version.cuda if torch.version.hip is None else f"hip {torch.version.hip}",
    }


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
