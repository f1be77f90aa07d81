"""The ahead-of-time compiler: every kernel is listed, and what cannot compile is reported."""

import os
import subprocess
import sys
from pathlib import Path

import compile_kernels
import pytest

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def helper(x, BLOCK: tl.constexpr):
    return tl.sum(x) + BLOCK

@triton.jit
def good(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(y, helper(values, BLOCK))

AOT_VARIANTS = [
    ("good", {"x": kind, "y": "*fp32", "n": "i32"}, {"BLOCK": 256}, 4)
    for kind in ("*bf16", "*fp32")
]
"""
NOT_A_POWER_OF_TWO = """
AOT_VARIANTS.append(("good", {"x": "*bf16", "y": "*fp32", "n": "i32"}, {"BLOCK": 257}, 4))
"""
INCOMPLETE = """
AOT_VARIANTS.append(("good", {"x": "*bf16", "y": "*fp32"}, {"BLOCK": 256}, 4))
"""
FORGOTTEN = """
@triton.jit
def forgotten(x):
    tl.store(x, 0.0)
"""


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run the tool on a package that holds the source, in a process without the interpreter."""
    package = folder / "toy_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "toy.py").write_text(source)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, compile_kernels.__file__, "--package", "toy_kernels"]
    return subprocess.run(
        [*command, "--targets", "sm_80", "gfx942", "--processes", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_of_the_library_has_a_variant() -> None:
    modules = compile_kernels.kernel_modules("lowpeak.kernels")
    assert compile_kernels.forgotten_kernels(modules) == []
    names = {variant.kernel for variant in compile_kernels.listed_variants(modules)}
    assert names, "no kernel is listed at all"


def test_compiles_for_both_backends(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run(tmp_path, KERNELS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1].split() == ["good", "2/2", "2/2"]
    assert "4 compiled, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        (NOT_A_POWER_OF_TWO, "power of 2"),
        (INCOMPLETE, "leaves out the arguments ['n']"),
        (FORGOTTEN, "FORGOTTEN forgotten"),
    ],
)
def test_reports_what_is_wrong(tmp_path: Path, addition: str, expected: str) -> None:
    pytest.importorskip("triton")
    done = run(tmp_path, KERNELS + addition)
    assert done.returncode == 1
    assert expected in done.stdout


def test_package_without_kernels_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "")
    assert done.returncode == 1
    assert "no kernels found" in done.stdout
