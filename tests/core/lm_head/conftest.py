"""Make the oracle of this folder importable; every test begins a run of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowpeak.lm_head import reset_expectations

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _fresh_expectations() -> Iterator[None]:
    """Misses of one test must not switch the single pass off in the next."""
    reset_expectations()
    yield
    reset_expectations()
