"""Makes `workers` and `scenes` importable by the tests beside them, and by the processes that they start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.dist)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(60))
