"""Tests of one file stay together; those that break ranks or lay cables take turns."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ALONE = {"break_it", "e2e"}
"""Folders of which no two tests run at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(TESTS)
        group = "alone" if path.parts[0] in ALONE else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
