"""Copies of the tree, builds, and clean environments, all without network."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NAMES = ("core", "trainers", "bench")


def run(
    *command: str | Path, environment: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; stderr is part of stdout."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PIP_NO_INDEX": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done


def copy_tree(folder: Path, version: str | None = None) -> Path:
    """Copy what the builds read, symlinks as symlinks; optionally under another version."""
    ignore = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.egg-info")
    for name in ("packages", "kernels", "cpp"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("VERSION", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    if version is not None:
        (folder / "VERSION").write_text(f"{version}\n", encoding="utf-8")
    return folder


def build_pure(tree: Path, name: str, output: Path) -> None:
    """Build a wheel of a package straight from a tree, without the extension: quick."""
    options = ["--no-isolation", "--wheel", "--outdir", str(output)]
    run(sys.executable, "-m", "build", *options, "-Cwheel.cmake=false", tree / "packages" / name)


def stub_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel of that name and version with nothing in it, and no requirements."""
    info = f"{name}-{version}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD")),
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)


def declared_requirements(wheel: Path) -> set[str]:
    """What a wheel requires, extras aside."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(file).decode())
    lines = metadata.get_all("Requires-Dist", [])
    return {line for line in lines if Requirement(line).marker is None}


def with_requirements(names: Iterable[str]) -> dict[str, Distribution]:
    """The named distributions and all they require, as installed where the tests run."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def clean_environment(folder: Path, *names: str, without: Iterable[str] = ()) -> Path:
    """A new virtual environment that holds the named distributions and what they require.

    They are linked from where the tests run, so it costs no download and no copy of torch. Returns
    its Python.
    """
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for name, found in with_requirements(names).items():
        if name in without:
            continue
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}:
            source = Path(str(found.locate_file(top)))
            if top != "__pycache__" and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin" / "python"


def run_clean(*command: str | Path) -> str:
    """Run a command of a clean environment, which PYTHONPATH must not enrich."""
    return run(*command, environment={"PYTHONPATH": ""}).stdout


def pip(python: Path, *arguments: str | Path) -> str:
    """Run the tests' pip on a clean environment, without any index."""
    return run_clean(sys.executable, "-m", "pip", "--python", python, *arguments)
