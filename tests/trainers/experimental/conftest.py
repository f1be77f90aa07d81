"""Tests of the experimental trainers: what TRL says of its own is not an error of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

# Raised on import, where `trl.experimental` comes first: filters of single tests come too late.
EXPERIMENTAL = "ignore:You are importing from 'trl.experimental'"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", EXPERIMENTAL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(EXPERIMENTAL))
