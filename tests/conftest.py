"""What all tests share: the device, skips by hardware, seeds, an environment without network."""
# ruff: noqa: E402 - the environment is set before torch, triton and transformers are imported

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[variable] = "1"
# Trackers that happen to be installed must not see the runs of the tests.
os.environ["WANDB_MODE"] = "disabled"

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_ROCM = HAS_CUDA and torch.version.hip is not None
HAS_XPU = torch.xpu.is_available()

if not (HAS_CUDA or HAS_XPU):
    # Kernel tests then run on CPU tensors; triton reads this when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1"

from lowpeak.native import native_available

HARDWARE = {
    "cuda": (HAS_CUDA, "needs a GPU behind torch.cuda"),
    "rocm": (HAS_ROCM, "needs an AMD GPU"),
    "xpu": (HAS_XPU, "needs an Intel GPU"),
    "multigpu": (torch.cuda.device_count() > 1, "needs two GPUs behind torch.cuda"),
    "native": (native_available() and sys.platform == "linux", "lowpeak._native is not built"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; deselect slow tests unless they were asked for."""
    for item in items:
        for marker, (present, reason) in HARDWARE.items():
            if not present and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--run-slow") or "slow" in config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(autouse=True)
def _fresh_expectations() -> None:
    """Misses of one test must not switch the fused head's single pass off in the next."""
    head = sys.modules.get("lowpeak.lm_head")
    if head is not None:
        head.reset_expectations()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    if HAS_CUDA:
        return torch.device("cuda")
    return torch.device("xpu" if HAS_XPU else "cpu")


# TrainingArguments hands settings to accelerate through the environment (ACCELERATE_DYNAMO_BACKEND
# and others), where the trainers of later tests would find them.
HANDED_ON = "ACCELERATE_"


def plain_torch() -> None:
    """Give torch the global state that the tests expect, whatever was there.

    float32 products in float32: TF32 is the user's choice, no oracle of ours knows it. transformers
    sets it by torch.backends.fp32_precision, accelerate by allow_tf32, and torch refuses to read
    one where only the other was set: so both are set.
    """
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _torch_state() -> Iterator[None]:
    """No test inherits the global state of another."""
    plain_torch()
    handed_on = {name: os.environ[name] for name in os.environ if name.startswith(HANDED_ON)}
    yield
    plain_torch()
    for name in [name for name in os.environ if name.startswith(HANDED_ON)]:
        del os.environ[name]
    os.environ.update(handed_on)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Each test starts from the same seeds, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - transformers and TRL draw from the global generator
    torch.manual_seed(0)
