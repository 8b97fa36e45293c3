"""A unit test gets three minutes with its fixtures, on slow machines too, unless it has its own `timeout` mark."""

from pathlib import Path

import pytest

UNIT_TEST_SECONDS = 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TEST_SECONDS))
