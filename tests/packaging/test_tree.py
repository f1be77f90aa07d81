"""The checks of the tree find nothing here, and find what is planted."""

from pathlib import Path

import check_tree
import pytest

FILES = {
    "VERSION": "0.1.0\n",
    "CITATION.cff": "title: x\nversion: 0.1.0\n",
    "CHANGELOG.md": "\n## [0.1.0]\n",
}


def test_this_tree_is_clean() -> None:
    assert list(check_tree.wrong_links()) == []
    assert list(check_tree.wrong_versions()) == []


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of a few files that check_tree looks at in place of ours."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    return tmp_path


def test_a_file_in_place_of_a_symlink_is_found(planted: Path) -> None:
    link = planted / "packages" / "core" / "VERSION"
    link.parent.mkdir(parents=True)
    link.write_text("../../VERSION", encoding="utf-8")
    assert any(
        f.startswith("packages/core/VERSION is no symlink") for f in check_tree.wrong_links()
    )
    link.unlink()
    link.symlink_to("../../VERSION")
    assert not any(f.startswith("packages/core/VERSION") for f in check_tree.wrong_links())


def test_a_forgotten_version_is_found(planted: Path) -> None:
    assert list(check_tree.wrong_versions()) == []
    (planted / "VERSION").write_text("0.2.0\n", encoding="utf-8")
    assert len(list(check_tree.wrong_versions())) == 2


def test_an_import_upwards_is_found(planted: Path) -> None:
    (planted / "kernels" / "op.py").write_text("import torch\nfrom lowpeak.x import y\n")
    assert list(check_tree.wrong_imports()) == ["kernels/op.py:2: must not import lowpeak"]


def test_long_and_non_ascii_modules_are_found(planted: Path) -> None:
    (planted / "kernels" / "op.py").write_text("x = 'a\u00e4'\n" * 401, encoding="utf-8")
    findings = list(check_tree.wrong_texts())
    assert len(findings) == 402
    assert findings[-1] == "kernels/op.py has 401 lines; split what is over 400"


def test_standard_streams_in_the_extension_are_found(planted: Path) -> None:
    for folder in ("include", "tests"):
        header = planted / "cpp" / folder / "a.hpp"
        header.parent.mkdir(parents=True)
        header.write_text("#pragma once\n#include <fstream>\n", encoding="utf-8")
    found = list(check_tree.wrong_includes())
    assert found == ["cpp/include/a.hpp:2: no standard streams in the extension"]
