"""The extension where it was built, and the answers where it was not."""

import re

import pytest

from lowpeak import native


def test_absence_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda _name: None)
    assert not native.native_available()
    assert "compiler" in native.native_summary()


@pytest.mark.skipif(not native.native_available(), reason="lowpeak._native was not built here")
def test_build_info_is_complete() -> None:
    from lowpeak._native import build_info

    info = build_info()
    assert info["cxx_standard"] >= 201703
    assert re.match(r"(gcc|clang|msvc) \d", info["compiler"])
    assert info["build_type"] in {"Debug", "Release", "RelWithDebInfo", "MinSizeRel"}
    assert info["compiler"] in native.native_summary()
