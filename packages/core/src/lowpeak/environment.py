"""The facts that a bug report needs, as ``lowpeak env`` prints them."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from lowpeak.native import native_summary

__all__ = ["environment_markdown", "environment_report"]

OURS = ("lowpeak-core", "lowpeak-trainers", "lowpeak-bench")
OTHERS = ("triton", "transformers", "trl", "accelerate", "peft")


def installed_version(distribution: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def device_names() -> list[str]:
    """Name and memory of each accelerator that torch sees, or "CPU only"."""
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = properties.total_memory / 2**30
        names.append(f"{properties.name} ({memory:.0f} GiB, compute capability {capability})")
    for index in range(torch.xpu.device_count()):
        memory = torch.xpu.get_device_properties(index).total_memory / 2**30
        names.append(f"{torch.xpu.get_device_name(index)} ({memory:.0f} GiB)")
    return names or ["CPU only"]


def environment_report() -> dict[str, str]:
    """Platform, versions, build and devices, in the order in which they are printed."""
    report = {"Platform": platform.platform(), "Python": platform.python_version()}
    report |= {name: installed_version(name) for name in OURS}
    report["lowpeak._native"] = native_summary()
    report["torch"] = str(torch.__version__)
    report["CUDA of torch"] = torch.version.cuda or "none"
    report["ROCm of torch"] = torch.version.hip or "none"
    report["Devices"] = "; ".join(device_names())
    report |= {name: installed_version(name) for name in OTHERS}
    return report


def environment_markdown() -> str:
    """The report as a Markdown list, ready to paste into an issue."""
    return "\n".join(f"- {name}: {value}" for name, value in environment_report().items())
