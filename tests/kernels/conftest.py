"""Share the oracle of the fused head, and what Triton's interpreter needs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "lm_head"))


# Triton 3.6's interpreter converts one-element arrays to ints, which numpy deprecates; and numpy
# warns of what a GPU does silently in lanes that tl.where drops (0 * inf).
INTERPRETER_WARNINGS = (
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for ignore in INTERPRETER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(ignore))
