"""An interrupted benchmark resumes without repeating finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def demo_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with runs that take no time: each returns how many there were."""
    import demo_runs

    trained: list[Any] = []

    def train(run: Any, port: int) -> dict[str, Any]:
        trained.append(run)
        if run.fields.get("algorithm") == "broken":
            raise RuntimeError("this one fails")
        return {"heldout_before": 0.1, "heldout_after": 0.1 * len(trained), "steps": 1, "seconds": 1.0}

    monkeypatch.setattr(demo_runs.DemoRun, "train", train)
    monkeypatch.setattr(demo_runs, "provenance", lambda packages: {"commit": f"c{len(trained)}"})
    return demo_runs, trained


def test_stored_results_are_not_measured_again(demo_runs: Any, tmp_path: Path) -> None:
    module, trained = demo_runs
    path = tmp_path / "results.json"
    grpo, rloo, broken = (module.DemoRun(0, {"algorithm": name}) for name in ("grpo", "rloo", "broken"))
    with pytest.raises(RuntimeError, match="this one fails"):
        module.run_all([grpo, broken, rloo], path=path, port=1)
    assert trained == [grpo, broken]
    results = module.run_all([grpo, rloo, module.DemoRun(1, {"algorithm": "grpo"})], path=path, port=1)
    assert len(trained) == 4, "grpo with seed 0 was there, grpo with seed 1 and rloo were not"
    assert [result["settings"]["seed"] for result in results] == [0, 0, 1]
    assert results[0]["measured"] == {"commit": "c0"}, "each result names its provenance"
    assert len(json.loads(path.read_text())["results"]) == 3


def test_different_fields_are_a_different_run(demo_runs: Any, tmp_path: Path) -> None:
    module, trained = demo_runs
    path = tmp_path / "results.json"
    module.run_all([module.DemoRun(0, {"algorithm": "grpo", "number_of_steps": 30})], path=path, port=1)
    module.run_all([module.DemoRun(0, {"algorithm": "grpo", "number_of_steps": 40})], path=path, port=1)
    module.run_all([module.DemoRun(0, {"algorithm": "grpo", "number_of_steps": 40}, tied=True)], path=path, port=1)
    assert len(trained) == 3


def test_every_algorithm_of_the_configuration_is_benchmarked() -> None:
    import algorithms

    from telescope.config.algorithms import ALGORITHM_FACTS

    assert set(algorithms.SETTINGS) == set(ALGORITHM_FACTS)
