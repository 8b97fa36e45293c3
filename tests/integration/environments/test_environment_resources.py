"""What an environment needs besides its code: named before a run where it lacks, measured in a run."""

import json

import pytest
from tests.fakes.judge import grades, judge_server

from telescope.environments.types import EnvironmentSpec
from telescope.errors import UnreachableError
from telescope.rollout.trial import try_environments


@pytest.fixture
def rows(tmp_path) -> str:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Capital of France?", "answer": "Paris"}))
    return str(tmp_path / "rows.jsonl")


def judged(rows: str, url: str) -> EnvironmentSpec:
    return EnvironmentSpec("dataset", {"path": rows, "reward": "judge", "judge": {"url": url, "model": "grader"}})


@pytest.mark.parametrize(
    ("provider", "missing"),
    [("local", "bubblewrap"), ("docker", "needs docker"), ("modal", "pip install modal"), ("e2b", "pip install e2b")],
)
def test_a_missing_program_or_package_of_a_sandbox_is_named_before_a_run(monkeypatch, tmp_path, provider, missing):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match=rf"The environment 'shell_countdown': .*{missing}"):
        try_environments([EnvironmentSpec("shell_countdown", {"dataset": "generated", "provider": provider})])


def test_a_judge_that_does_not_answer_is_named_before_a_run(rows):
    with judge_server(lambda _: (404, "no such model", {})) as (url, requests):
        problem = rf"the judge 'grader' at {url} failed: .*404.*no such model.*\. Correct url"
        with pytest.raises(UnreachableError, match=f"The environment 'dataset': {problem}"):
            try_environments([judged(rows, url)])
    assert len(requests) == 1
    with judge_server(lambda body: grades(body, 0)) as (url, _):
        assert try_environments([judged(rows, url)])[0].num_samples == 1


async def test_what_a_judge_costs_is_a_metric_of_each_sample(load, encode, rows):
    with judge_server(lambda body: grades(body, 5)) as (url, _):
        pool = await load(judged(rows, url))
        first, second = [(await pool.answer("dataset", 0, encode("Paris"), "stop")).reward for _ in range(2)]
    assert (first.total_reward, first.sample_metrics["judge"]) == (0.5, 0.5)
    assert (first.sample_metrics["judge/calls"], first.sample_metrics["judge/tokens"]) == (1.0, 110.0)
    assert (second.sample_metrics["judge/calls"], second.sample_metrics["judge/cache_hits"]) == (1.0, 1.0)
    assert "judge/tokens" not in second.sample_metrics
