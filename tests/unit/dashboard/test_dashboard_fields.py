"""Fields of the list of runs: settings, last values, evals, and which runs are one experiment."""

import json

import pytest
from tests.unit.dashboard.conftest import client_of, write_run, write_step

from telescope.dashboard.registry import LINE_POINTS, Registry, experiment, known_fields, values_of
from telescope.health import rules
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run


def rows(client, fields=""):
    return {row["id"]: row for row in client.get(f"/api/runs?fields={fields}").json()["runs"]}


def test_a_run_has_the_fields_that_were_asked_for(client):
    found = rows(client, "config.algorithm,last.timing_step_total,eval.math,config.nothing")
    expected = {"last.timing_step_total": 10.0, "eval.math": 0.5, "config.nothing": None}
    assert found["first"]["fields"] == {"config.algorithm": "grpo", **expected}
    assert found["below~second"]["fields"] == {"config.algorithm": "rloo", **expected}
    assert rows(client)["first"]["fields"] == {}


def test_the_last_value_is_the_mean_of_ten_steps_that_count(root):
    fields = values_of(Run(root / "first"), {})
    assert fields["last.entropy"] == pytest.approx(1.0 - 0.01 * 6.5)
    assert fields["last.grad_norm"] == 1.0


def test_the_newest_eval_counts(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for version, accuracy in ((0, 0.1), (8, 0.4), (4, 0.2), (9, None)):
            result = {"version": version, "step": version - 1, "accuracy": accuracy}
            recorder.write("evals", {"eval_id": str(version), "name": "math", "status": "finished", **result})
    assert values_of(Run(tmp_path / "run"), {}) == {"eval.math": 0.4}


def test_an_attempt_that_goes_far_back_keeps_the_last_values_before_it(tmp_path):
    for attempt, steps in enumerate((range(60), range(10, 12)), 1):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=steps[0])
            for step in steps:
                recorder.write("steps", {"step": step, "metrics": {"entropy": float(step)}})
            ended = {"eval_id": "e", "name": "math", "step": steps[-1], "version": steps[-1] + 1}
            recorder.write("evals", {**ended, "status": "finished", "accuracy": 0.1 * attempt})
    assert values_of(Run(tmp_path / "run"), {}) == {"last.entropy": 6.5, "eval.math": 0.2}


def test_fields_tell_in_how_many_runs_and_values_they_are(client):
    found = {row["name"]: row for row in client.get("/api/fields").json()}
    assert found["config.algorithm"] == {**found["config.model"], "name": "config.algorithm", "values": 2} | {
        "examples": found["config.algorithm"]["examples"]
    }
    assert sorted(found["config.algorithm"]["examples"]) == ["grpo", "rloo"]
    assert found["config.model"].items() >= {"runs": 2, "values": 1, "examples": ["tiny"]}.items()
    assert {"last.entropy", "eval.math"} <= found.keys()


def test_values_that_are_lists_are_told_apart():
    (field,) = known_fields([{"a": [1]}, {"a": [1]}, {"a": [2]}])
    assert field == {"name": "a", "runs": 3, "values": 2, "examples": [[1], [2]]}


def test_an_experiment_is_all_settings_but_seed_and_names():
    config = {"lr": 1e-4, "seed": 0, "run_dir": "a", "wandb_run_name": "a"}
    assert experiment(config) == experiment({**config, "seed": 1, "run_dir": "b", "wandb_run_name": "b"})
    assert experiment(config) != experiment({**config, "lr": 2e-4})


def test_the_curve_of_rewards_has_few_points(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(3 * LINE_POINTS):
            reward = float("nan") if step < 3 else float(step)
            recorder.write("steps", {"step": step, "reward_mean": reward, "metrics": {}})
    (_, listing), *_ = Registry([tmp_path]).listings()
    assert len(listing.rewards) == LINE_POINTS
    assert listing.rewards[:3] == [None, 4.0, 7.0]


def test_the_list_follows_a_live_run(tmp_path):
    client = client_of(tmp_path)
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json=json.dumps({"values": {}}))
        for step in range(3):
            write_step(recorder, step)
            assert recorder.flush()
            row = rows(client, "last.entropy")["run"]
            assert (row["live"], row["steps"], len(row["rewards"])) == (True, step + 1, step + 1)
            assert row["fields"]["last.entropy"] == pytest.approx(1 - 0.005 * step)


def test_the_key_of_a_run_stays_when_its_folder_is_renamed(tmp_path):
    write_run(tmp_path / "old", "grpo")
    client = client_of(tmp_path)
    before = rows(client)["old"]["key"]
    (tmp_path / "old").rename(tmp_path / "new")
    moved = client_of(tmp_path)
    assert rows(moved)["new"]["key"] == before


def test_metrics_near_the_largest_number_have_a_mean_and_a_health(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=30)
        for step in range(30):
            metrics = dict.fromkeys(rules.READ, 1e308 * (1 + step % 2 / 2))
            recorder.write("steps", {"step": step, "metrics": metrics})
    assert values_of(Run(tmp_path / "run"), {})["last." + rules.ENTROPY] == pytest.approx(1.25e308)
    client = client_of(tmp_path)
    for address in ("runs/run/health", "fields", "runs"):
        assert client.get(f"/api/{address}").status_code == 200
