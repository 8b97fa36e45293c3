"""Arguments and failures of the benchmarks that train the demo."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("given", "seeds", "steps"), [
    ([], [0, 1, 2], None),
    (["--quick"], [0], 5),
    (["--quick", "--seeds", "3", "4", "--steps", "7"], [3, 4], 7),
])  # fmt: skip
def test_quick_replaces_only_what_is_not_given(monkeypatch, given, seeds, steps):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from demo_runs import parse_runs, parser_of_runs

    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    arguments = parse_runs(parser_of_runs("Trains.", "few steps", "60"), quick_steps=5)
    assert (arguments.seeds, arguments.steps) == (seeds, steps)


def test_a_failed_run_ends_a_benchmark_without_a_traceback(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import demo_runs

    monkeypatch.setattr(demo_runs, "ensure_tiny_model", lambda **_: "model")
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SystemExit, match="The run ended with exit code 1"):
        demo_runs.DemoRun(0, {}).train(8100)
