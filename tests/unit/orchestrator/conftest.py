"""Runs of these tests leave the cycle collector alone: a full collection of pytest's heap takes longer than most."""

from __future__ import annotations

from contextlib import nullcontext

import pytest


@pytest.fixture(autouse=True)
def _no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.orchestrator.orchestrator.rare_full_collections", nullcontext)
