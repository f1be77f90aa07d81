"""One version: the file VERSION, the three distributions, the extension and the citation agree."""

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

from lowpeak.native import native_available

ROOT = Path(__file__).parents[1]
VERSION = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
PINS = {
    "lowpeak-core": [],
    "lowpeak-trainers": ["lowpeak-core"],
    "lowpeak-bench": ["lowpeak-core", "lowpeak-trainers"],
}


@pytest.mark.parametrize("name", PINS)
def test_distribution_has_the_version_and_pins_the_others(name: str) -> None:
    try:
        found = version(name)
    except PackageNotFoundError:
        pytest.skip(f"{name} is on the path but not installed")
    assert found == VERSION, "reinstall: the metadata of an editable install is a snapshot"
    pinned = [line for line in requires(name) or [] if line.startswith("lowpeak-")]
    unconditional = sorted(line for line in pinned if ";" not in line)
    assert unconditional == [f"{pin}=={VERSION}" for pin in PINS[name]]
    assert all(f"=={VERSION}" in line for line in pinned)


@pytest.mark.skipif(not native_available(), reason="lowpeak._native was not built here")
def test_native_has_the_version() -> None:
    from lowpeak._native import build_info

    assert build_info()["version"] == VERSION


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
