"""Without a compiler the build succeeds without the extension, says so, and can be told to fail."""

import os
import sys
from pathlib import Path

import pytest
from packaging_tools import run


def build_without_compiler(tree: Path, output: Path, **more: str) -> tuple[int, str, list[str]]:
    """Build the wheel of core with no compiler to be found; exit status, output, wheels."""
    empty = output / "empty"
    empty.mkdir(parents=True)
    environment = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PATH": str(empty), **more}
    options = ["--no-build-isolation", "--no-deps", "--verbose", "--wheel-dir", str(output)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(tree / "packages" / "core")]
    done = run(*command, environment=environment, check=False)
    return done.returncode, done.stdout, [path.name for path in output.glob("*.whl")]


@pytest.fixture
def _not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWPEAK_REQUIRE_NATIVE", raising=False)


@pytest.mark.usefixtures("_not_required")
def test_build_succeeds_and_says_so(tree: Path, tmp_path: Path) -> None:
    status, output, wheels = build_without_compiler(tree, tmp_path / "out")
    assert status == 0, output
    assert len(wheels) == 1
    assert wheels[0].endswith("-py3-none-any.whl")
    assert "built WITHOUT its native extension" in output
    assert "install a C++17 compiler" in output


def test_build_fails_where_the_extension_is_required(tree: Path, tmp_path: Path) -> None:
    required = {"LOWPEAK_REQUIRE_NATIVE": "1"}
    status, output, wheels = build_without_compiler(tree, tmp_path / "out", **required)
    assert status != 0
    assert wheels == []
    assert "LOWPEAK_REQUIRE_NATIVE is set" in output


@pytest.mark.skipif(os.environ.get("LOWPEAK_REQUIRE_NATIVE") != "1", reason="not required here")
def test_extension_is_there_where_it_is_required() -> None:
    from lowpeak.native import native_available

    assert native_available()
