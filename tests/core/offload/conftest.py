"""Full collections between the tests cost what the tests made, not what torch's import did."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _imports_are_not_collected() -> Iterator[None]:
    # 0.25 s a collection, twice a test, with what torch and transformers leave on the heap.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
