"""The extension where it was built, and the answers where it was not."""

import re

import numpy as np
import pytest

from lowpeak import native

built = pytest.mark.skipif(
    not native.native_available(), reason="lowpeak._native was not built here"
)


def test_absence_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda _name: None)
    assert not native.native_available()
    assert "compiler" in native.native_summary()


@built
def test_build_info_is_complete() -> None:
    from lowpeak._native import build_info

    info = build_info()
    assert info["cxx_standard"] >= 201703
    assert re.match(r"(gcc|clang|msvc) \d", info["compiler"])
    assert info["build_type"] in {"Debug", "Release", "RelWithDebInfo", "MinSizeRel"}
    assert info["compiler"] in native.native_summary()


@built
def test_packer_refuses_what_it_cannot_index() -> None:
    from lowpeak._native import best_fit_decreasing

    lengths = np.array([2, 5], dtype=np.int64)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 5, outside 1\.\.4"):
        best_fit_decreasing(lengths, 4)
    with pytest.raises(ValueError, match="capacity must be at least 1, not 0"):
        best_fit_decreasing(lengths, 0)
    with pytest.raises(ValueError, match="one dimension"):
        best_fit_decreasing(lengths[None], 4)
    with pytest.raises(TypeError):
        best_fit_decreasing(lengths.astype(np.float64), 4)


@built
def test_packer_in_several_threads() -> None:
    """Two packers at once, each on its own array, give what one alone gives."""
    from concurrent.futures import ThreadPoolExecutor

    from lowpeak._native import best_fit_decreasing

    lengths = np.random.default_rng(0).integers(1, 513, 100_000)
    alone = best_fit_decreasing(lengths, 512)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda _: best_fit_decreasing(lengths, 512), range(4)):
            np.testing.assert_array_equal(result[0], alone[0])
            np.testing.assert_array_equal(result[1], alone[1])
