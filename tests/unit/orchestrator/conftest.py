"""Skips full garbage collections, which take longer than most of these tests in pytest's heap."""

from contextlib import nullcontext

import pytest


@pytest.fixture(autouse=True)
def _no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.orchestrator.orchestrator.rare_full_collections", nullcontext)
