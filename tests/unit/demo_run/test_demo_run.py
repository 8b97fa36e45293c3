"""The generated run is consistent: its answers, its metrics and its times."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from tests.documented_metrics import undocumented

from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import health_of
from telescope.record.reader import Run
from telescope.record.tables import TABLES
from telescope.testing.demo_run.curves import Curves, Story
from telescope.testing.demo_run.evals import EVALS
from telescope.testing.demo_run.live import STORY
from telescope.testing.demo_run.steps import GROUP_SIZE, NUM_SERVERS, Simulation
from telescope.testing.demo_run.tasks import TASKS, problems
from telescope.testing.demo_run.writer import RunWriter

NUM_STEPS = 14
ORIGIN = 1_800_000_000.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "generated"
    with RunWriter(folder, Story(server_down=(3, 5)), num_steps=NUM_STEPS, origin=ORIGIN) as writer:
        for number in range(NUM_STEPS):
            writer.write_step(number)
        writer.write_gauges(NUM_STEPS, 5.0)
        writer.end()
    return Run(folder)


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_are_right_and_wrong_ones_are_wrong(task: str) -> None:
    for problem in problems("train")[task]:
        for answers, correct in ((problem.right, 1.0), ([*problem.wrong, problem.looping], 0.0)):
            assert {answer.reward.sample_metrics["correct"] for answer in answers} == {correct}
        assert all(len(answer.turns[-1].text) > 0 for answer in problem.right)
        assert problem.looping.turns[-1].generation.finish_reason == "length"


def test_a_tool_call_is_valid_json_and_has_the_result_that_the_model_is_told() -> None:
    for problem in problems("train")["calculator_agent"]:
        for answer in problem.right:
            for turn, after in pairwise(answer.turns):
                (call,) = turn.tool_calls
                assert json.loads(call["arguments"])["expression"]
                assert after.replies == [("tool", call["result"])]


def test_a_step_depends_on_the_seed_and_its_number_alone() -> None:
    one, other = (Simulation(Curves(STORY), origin=ORIGIN) for _ in range(2))
    other.step(3)
    first, second = one.step(7), other.step(7)
    assert [[s.completion_text for s in g.samples] for g in first.groups] == [
        [s.completion_text for s in g.samples] for g in second.groups
    ]
    assert first.result.metrics == second.result.metrics


def test_every_table_has_rows_and_every_metric_and_gauge_is_documented(run: Run) -> None:
    empty = {name for name in TABLES if not run.table(name).num_rows}
    assert empty == set()
    names = {name for row in run.table("steps", columns=["metrics"]).to_pylist() for name, _ in row["metrics"]}
    gauges = set(run.table("gauges", columns=["name"])["name"].to_pylist())
    assert len(names) > 100
    assert undocumented(names | {name for name in gauges if not name.startswith("vllm:")}) == []


def test_the_metrics_of_a_step_are_those_of_its_samples(run: Run) -> None:
    rows = run.sql(
        "select s.step, s.metrics['reward/total/mean'] as trained, s.metrics['kept/samples'] as kept, "
        "(select avg(reward) from samples k where k.step = s.step and k.status = 'kept') as of_samples, "
        "(select count(*) from samples k where k.step = s.step and k.status = 'kept') as counted, "
        "(select mean from step_stats t where t.step = s.step and t.environment = '' and t.metric = 'reward') as stats "
        "from steps s order by step"
    ).to_dicts()
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    for row in rows:
        assert row["trained"] == pytest.approx(row["of_samples"]) == pytest.approx(row["stats"])
        assert row["kept"] == row["counted"]


def test_the_requests_of_a_lane_follow_each_other_and_no_server_that_is_down_has_any(run: Run) -> None:
    lanes = defaultdict(list)
    for row in run.sql("select * from samples where status <> 'eval'").to_dicts():
        lanes[row["server"], row["lane"]].append((row["started_at"], row["finished_at"], row["step"]))
    assert len(lanes) == NUM_SERVERS * GROUP_SIZE
    for intervals in lanes.values():
        ordered = sorted(intervals)
        assert all(one[1] <= next_one[0] + 0.01 for one, next_one in pairwise(ordered))
    assert {step for (server, _), rows in lanes.items() for *_, step in rows if server == 2} & {3, 4} == set()
    kinds = [(row["kind"], row["step"]) for row in run.table("alerts").to_pylist() if row["kind"] == "server"]
    assert kinds == [("server", 3), ("server", 5)]


def test_answers_improve_and_evals_with_them() -> None:
    simulation = Simulation(Curves(STORY), origin=ORIGIN)
    rewards = [
        [s.total_reward for step in steps for g in simulation.step(step).groups for s in g.usable_samples]
        for steps in (range(0, 10), range(230, 240))
    ]
    first, last = (sum(row) / len(row) for row in rewards)
    assert (first < 0.5, last > 0.7) == (True, True)


def test_the_record_looks_like_that_of_a_real_run(run: Run) -> None:
    registry = Registry([run.files.run_dir])
    health = health_of(registry, next(iter(registry.stores())))
    assert health["progress"]["step"] == NUM_STEPS
    assert len(health["cells"]) == 10
    assert {row["name"] for row in run.table("evals").to_pylist()} == set(EVALS)
    (notes,) = run.table("attempts")["notes"].to_pylist()
    assert "generated" in notes[0]
    whole = run.sql("select count(*) from eval_samples e join samples s using (attempt, sample_id)").rows[0][0]
    assert whole == run.table("eval_samples").num_rows


def test_a_live_run_shows_the_samples_that_are_generated(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "live", Story(), num_steps=9, origin=time.time() - 9.0) as writer:
        writer.write_in_flight(3, time.time())
        writer.recorder.flush()
        rows = Run(tmp_path / "live").in_flight().to_pylist()
    assert rows and {row["status"] for row in rows} == {"in_flight"}


def test_a_run_that_diverges_fails_with_an_alert(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "bad", Story(not_finite=2), num_steps=3, origin=ORIGIN) as writer:
        for number in range(3):
            writer.write_step(number)
        writer.end("failed", "ArithmeticError: the loss is not a number")
    bad = Run(tmp_path / "bad")
    kinds = [(row["kind"], row["step"]) for row in bad.table("alerts").to_pylist() if row["level"] == "error"]
    assert (bad.status, kinds) == ("failed", [("not_finite", 2), ("run", 3)])
