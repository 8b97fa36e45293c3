"""Families of models, from transformers to the engine's weights: `benchmarks/families.py` proves each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.families import FAMILIES

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[3]
SECONDS_OF_A_FAMILY = 120
ON_CPU = [family for family in FAMILIES if not family.needs_gpu]


def prove(names: list[str], path: Path) -> dict[str, dict[str, Any]]:
    """Runs the benchmark in a process of its own, because vLLM changes the process that it is in."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "families.py"), *names, "--json", str(path)],
        cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=SECONDS_OF_A_FAMILY * (len(names) + 1),
    )  # fmt: skip
    assert path.is_file(), done.stderr[-3000:]
    return {result["name"]: result for result in json.loads(path.read_text())["results"]}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [family.name for family in ON_CPU if family.is_fast]
    return prove(names, tmp_path_factory.mktemp("families") / "fast.json")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    names = [family.name for family in ON_CPU if not family.is_fast]
    return prove(names, tmp_path_factory.mktemp("families") / "others.json")


def check(result: dict[str, Any]) -> None:
    assert result["problem"] == ""
    assert result["trainer"] < 1e-5
    assert result["engine"] < 1e-3
    assert result["transfer"] < 1e-3
    assert result["moved"] > 0.1, "an engine with the old weights would show"


@pytest.mark.parametrize("name", [family.name for family in ON_CPU if family.is_fast])
def test_a_fast_family_is_proven(fast: dict[str, dict[str, Any]], name: str) -> None:
    check(fast[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [family.name for family in ON_CPU if not family.is_fast])
def test_a_family_is_proven(others: dict[str, dict[str, Any]], name: str) -> None:
    check(others[name])
