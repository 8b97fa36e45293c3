"""Imports benchmarks by their bare names, afresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.repository_modules import benchmarks_importable


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    with benchmarks_importable():
        yield
