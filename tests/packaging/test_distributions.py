"""sdist -> wheel -> install -> import, in environments that hold nothing else."""

import json
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging_tools import (
    NAMES,
    ROOT,
    build_pure,
    clean_environment,
    copy_tree,
    declared_requirements,
    pip,
    run_clean,
    stub_wheel,
)

VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
OPTIONAL = ("triton", "transformers", "trl", "accelerate", "datasets", "peft")
IMPORT_CORE = f"""
import sys, lowpeak, lowpeak.cli, lowpeak.kernels, lowpeak.memory, torch
loaded = set({OPTIONAL!r}) & sys.modules.keys()
assert not loaded, loaded
for name in {OPTIONAL!r}:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " is in the environment that should lack it")
print(lowpeak.__file__)
hidden, weight = torch.ones(2, 3), torch.eye(3)
out = lowpeak.fused_lm_head(hidden, weight, torch.tensor([0, 2]))
torch.testing.assert_close(out.log_probs, torch.full((2,), -torch.tensor(3.0).log().item()))
import lowpeak.packing
assert lowpeak.packing.best_fit_decreasing([3, 5, 2], 8).items.tolist() == [1, 0, 2]
"""
# What a name of a file inside an sdist or a wheel must not contain.
LITTER = ("stale", ".cache", "CMakeCache", "__pycache__", "/tests/", ".git", "/build/")


def members(dist: Path, name: str) -> list[tarfile.TarInfo]:
    """All entries of the sdist of one distribution."""
    with tarfile.open(dist / f"lowpeak_{name}-{VERSION}.tar.gz") as archive:
        return archive.getmembers()


def wheel_of(folder: Path, name: str) -> Path:
    """The one wheel of a distribution in a folder."""
    (wheel,) = folder.glob(f"lowpeak_{name}-*.whl")
    return wheel


@pytest.mark.parametrize("name", NAMES)
def test_sdist_holds_real_files_and_no_litter(dist: Path, name: str) -> None:
    entries = members(dist, name)
    assert all(entry.isfile() or entry.isdir() for entry in entries), (
        "a symlink went into the sdist"
    )
    names = [entry.name for entry in entries]
    assert [entry for entry in names if any(word in entry for word in LITTER)] == []
    for file in ("LICENSE", "README.md", "VERSION"):
        assert f"lowpeak_{name}-{VERSION}/{file}" in names


def test_core_sdist_holds_kernels_and_cpp(dist: Path) -> None:
    names = {entry.name.split("/", 1)[-1] for entry in members(dist, "core")}
    kernels = {f"src/lowpeak/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert kernels <= names
    assert {"cpp/CMakeLists.txt", "cpp/src/build_info.cpp", "src/lowpeak/py.typed"} <= names


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_one_typed_package(dist: Path, name: str) -> None:
    package = "lowpeak" if name == "core" else f"lowpeak_{name}"
    files = zipfile.ZipFile(wheel_of(dist, name)).namelist()
    assert f"{package}/py.typed" in files
    assert {file.split("/")[0] for file in files if ".dist-info" not in file} == {package}
    assert [file for file in files if any(word in f"/{file}" for word in LITTER)] == []
    expected = "py3-none-any" if name != "core" else f"cp3{sys.version_info.minor}"
    assert expected in wheel_of(dist, name).name


def test_trainers_wheel_adds_a_command(dist: Path) -> None:
    wheel = zipfile.ZipFile(wheel_of(dist, "trainers"))
    (file,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    entries = ConfigParser()
    entries.read_string(wheel.read(file).decode())
    assert dict(entries["lowpeak.commands"]) == {
        "lengths": "lowpeak_trainers.lengths.command:add_lengths"
    }
    assert "lowpeak_trainers/lengths/command.py" in wheel.namelist()


def test_core_alone_imports_without_optional_packages(dist: Path, tmp_path: Path) -> None:
    python = clean_environment(tmp_path / "env", "torch", "numpy", without=["triton"])
    # What torch itself requires differs from build to build, and is not ours to resolve.
    assert declared_requirements(wheel_of(dist, "core")) == {"numpy>=1.26", "torch>=2.11"}
    pip(python, "install", "--no-index", "--no-deps", wheel_of(dist, "core"))
    # From an empty folder and isolated: nothing but the environment is on the path.
    where = run_clean(python, "-I", "-c", IMPORT_CORE)
    assert where.startswith(str(tmp_path / "env"))
    report = run_clean(tmp_path / "env" / "bin" / "lowpeak", "env")
    assert f"- lowpeak-core: {VERSION}" in report
    assert f"- lowpeak._native: {VERSION} (" in report
    assert "- trl: not installed" in report


OF_CORE = {"numpy": "1.26.0", "torch": "2.11.0"}
OF_TRAINERS = {**OF_CORE, "trl": "1.16.0", "transformers": "5.17.0"}
OF_BENCH = {**OF_TRAINERS, "matplotlib": "3.9.0", "rich": "13.0.0", "tqdm": "4.66.0"}


@pytest.fixture(scope="session")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels with this version and a newer one of all three.

    Beside them stubs of what they require, each of the oldest version that they accept, and a TRL
    that is too new: so that no build of torch has a say.
    """
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in (*OF_BENCH.items(), ("trl", "2.0.0")):
        stub_wheel(folder, name, version)
    for version in (VERSION, "99.0.0"):
        tree = copy_tree(tmp_path_factory.mktemp("copy"), version)
        for name in NAMES:
            build_pure(tree, name, folder)
    return folder


@pytest.mark.parametrize("version", [VERSION, "99.0.0"])
def test_each_distribution_pulls_its_own_version(
    two_versions: Path, tmp_path: Path, version: str
) -> None:
    python = clean_environment(tmp_path / "env")
    core_and_trainers = ("lowpeak-core", "lowpeak-trainers")
    for name, pulled, others in (
        ("lowpeak-core", ("lowpeak-core",), OF_CORE),
        ("lowpeak-trainers", core_and_trainers, OF_TRAINERS),
        ("lowpeak-bench", (*core_and_trainers, "lowpeak-bench"), OF_BENCH),
        ("lowpeak-core[trainers]", core_and_trainers, OF_TRAINERS),
    ):
        report = tmp_path / "report.json"
        options = ["--dry-run", "--report", report, "--no-index", "--find-links", two_versions]
        pip(python, "install", *options, f"{name}=={version}")
        chosen = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        found = {item["name"]: item["version"] for item in chosen}
        assert found == {**dict.fromkeys(pulled, version), **others}
