"""The demo's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.tiny_model.cache import ensure_tiny_model


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The demo's model, made once and then taken from the cache."""
    return ensure_tiny_model()
