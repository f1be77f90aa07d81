"""The distributions of this tree, built once for all tests here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from packaging_tools import NAMES, copy_tree, run


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with litter in it, as a developer's checkout has."""
    folder = copy_tree(tmp_path_factory.mktemp("tree"))
    core = folder / "packages" / "core"
    litter = (
        "src/lowpeak/stale.cpython-311-x86_64-linux-gnu.so",
        ".cache/x",
        "build/x/CMakeCache.txt",
    )
    for file in litter:
        (core / file).parent.mkdir(parents=True, exist_ok=True)
        (core / file).write_text("litter", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of each distribution and the wheel that was built from it."""
    output = tmp_path_factory.mktemp("dist")
    for name in NAMES:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
        run(*command, tree / "packages" / name)
    return output
