"""Runs, their steps and their differences, against the rows that were written."""

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.dashboard.conftest import NUM_STEPS, T0, client_of, sample_rows, write_run, write_step
from tests.unit.orchestrator.fakes import gini

from telescope.cli.ui import address, choose_places, listen
from telescope.dashboard import events
from telescope.dashboard.curves import eval_samples, evals
from telescope.dashboard.events import parse_id, run_events
from telescope.dashboard.registry import SEARCH_SECONDS
from telescope.dashboard.remote import RemoteCopy
from telescope.dashboard.runs import eval_points
from telescope.dashboard.store import RunStore
from telescope.errors import UserError
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run


def test_runs_below_the_root_are_listed_with_config_and_status(client):
    body = client.get("/api/runs").json()
    assert body["problems"] == []
    rows = {row["id"]: row for row in body["runs"]}
    assert set(rows) == {"first", "below~second"}
    expected = {"name": "first", "status": "finished", "live": False, "attempt": 2, "steps": 12, "num_steps": 12}
    config = {"model": "tiny", "algorithm": "grpo", "environments": ["countdown", "wordle"]}
    assert rows["first"].items() >= {**expected, "steps": 12, "heldout_after": 0.5}.items()
    assert {name: rows["first"][name] for name in config} == config


def test_the_list_has_the_newest_held_out_accuracy_of_a_live_run_and_its_best_checkpoint(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=40)
        for version, accuracy in ((0, 0.1), (10, 0.4), (20, 0.3)):
            row = {"step": version - 1, "version": version, "source": "live"}
            recorder.write("evals", {**row, "eval_id": f"a{version}", "number": 0, "name": "train", "accuracy": 0.9})
            held_out = {"number": 1, "name": "test", "held_out": True, "accuracy": accuracy, "metric": "reward"}
            recorder.write("evals", {**row, "eval_id": f"b{version}", **held_out})
            (recorder.files.checkpoints / f"step_{version}").mkdir(parents=True)
        later = {"eval_id": "c", "step": 29, "version": 30, "source": "standalone", "name": "test", "accuracy": 1.0}
        recorder.write("evals", later)
        recorder.flush()
        (row,) = client_of(tmp_path).get("/api/runs").json()["runs"]
    shown = (row["live"], row["heldout_before"], row["heldout_after"], row["heldout_step"], row["best_checkpoint"])
    assert shown == (True, pytest.approx(0.1), pytest.approx(0.3), 20, 10)
    assert row["metrics"] == {"eval.test": "reward", "heldout": "reward"}


def test_a_run_shows_config_user_choices_attempts_and_environments(client):
    body = client.get("/api/runs/first").json()
    assert (body["config"]["algorithm"], body["user_set"]) == ("grpo", ["algorithm"])
    assert [row["first_step"] for row in body["attempts"]] == [0, 10]
    assert body["environments"][0]["metrics_ranges"] == {"correct": {"min": 0, "max": 1}}
    assert body["result"] == {"heldout_after": 0.5}


def test_steps_are_columns_without_superseded_rows(client, root):
    body = client.get("/api/runs/first/steps").json()
    rows = sorted(Run(root / "first").table("steps").to_pylist(), key=lambda row: row["step"])
    assert body["step"] == list(range(NUM_STEPS))
    assert body["attempt"] == [1] * 10 + [2] * 2
    assert body["started_at"][4] == T0 + 40
    for name in ("entropy", "reward/total/mean"):
        assert body["metrics"][name] == pytest.approx([dict(row["metrics"])[name] for row in rows], rel=1e-8)
    assert body["metrics"]["grad_norm"][3] is None and math.isnan(dict(rows[3]["metrics"])["grad_norm"])


def test_statistics_of_samples_stand_beside_the_step_metrics(client):
    metrics = client.get("/api/runs/below~second/steps").json()["metrics"]
    for step in (0, 7):
        kept = [row for row in sample_rows(step) if row["status"] == "kept"]
        values = [row["reward"] for row in kept if row["environment"] == "countdown"]
        ginis = [gini(values[first : first + 4]) for first in (0, 4)]
        for name in ("sample_metrics/countdown/correct", "reward/countdown"):
            assert metrics[f"{name}/std"][step] == pytest.approx(np.std(values, ddof=1))
            assert (metrics[f"{name}/min"][step], metrics[f"{name}/max"][step]) == (min(values), max(values))
            assert metrics[f"{name}/gini"][step] == pytest.approx(statistics.fmean(ginis))
    assert "reward/total/gini" not in metrics


def test_steps_are_read_once(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(3):
            write_step(recorder, step)
        assert recorder.flush()
        store = RunStore(Run(tmp_path / "run"))
        assert store.steps()[0] == 3
        read = Run.rows_since
        reads = []
        store.run.rows_since = lambda name, at, *rest: reads.append((name, at)) or read(store.run, name, at, *rest)
        write_step(recorder, 3)
        assert recorder.flush()
        assert store.steps(3)[1]["step"] == [3]
        assert all(cursor >= 3 for name, cursor in reads if name == "steps")


def test_a_step_whose_statistics_come_later_has_them_in_the_end(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        write_step(recorder, 0)
        names = {"environment": "wordle", "metric": "sample_metrics/correct"}
        recorder.write("step_stats", {**names, "step": 1, "std": 0.5})
        assert recorder.flush()
        store = RunStore(Run(tmp_path / "run"))
        assert len(store.steps()[2]["sample_metrics/wordle/correct/std"]) == 1
        recorder.write("steps", {"step": 1, "metrics": {"sample_metrics/wordle/correct": 1.0}})
        assert recorder.flush()
        assert store.steps(1)[2]["sample_metrics/wordle/correct/std"] == [0.5]


def test_statistics_of_a_step_that_was_killed_are_not_looked_for_again(tmp_path):
    names = {"environment": "wordle", "metric": "sample_metrics/correct", "std": 0.5}
    metrics = {"metrics": {"sample_metrics/wordle/correct": 1.0}}
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("step_stats", {**names, "step": 0})
        recorder.write("steps", {"step": 0, **metrics})
        recorder.write("step_stats", {**names, "step": 1})
    store = RunStore(Run(tmp_path / "run"))
    assert store.steps()[2]["sample_metrics/wordle/correct/std"] == [0.5] and store._steps._pending
    with Recorder(tmp_path / "run", attempt=2) as recorder:
        recorder.write("step_stats", {**names, "step": 1, "std": 0.7})
        recorder.write("steps", {"step": 1, **metrics})
    assert store.steps()[2]["sample_metrics/wordle/correct/std"] == [0.5, 0.7]
    assert not store._steps._pending


def test_evals_of_one_name_are_told_apart_by_their_numbers(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        config = {"values": {"evals": [{"name": name} for name in ("a", "b", "a")]}}
        begin_run(recorder, name="r", config_hash="c", config_json=json.dumps(config))
        for number, name in enumerate(("a", "b", "a")):
            recorder.write(
                "evals", {"eval_id": f"{number}", "name": name, "number": number, "step": 3, "accuracy": 0.5}
            )
        recorder.write("evals", {"eval_id": "again", "name": "b", "number": 1, "step": 3, "source": "standalone"})
        for number in (0, 1):
            recorder.write(
                "evals", {"eval_id": f"c{number}", "name": "c", "number": number, "step": 3, "source": "standalone"}
            )
    store = RunStore(Run(tmp_path / "run"))
    assert [(row["name"], row["eval_name"]) for row in evals(store)] == [
        ("a#0", "a"), ("c#0", "c"), ("b", "b"), ("b", "b"), ("c#1", "c"), ("a#2", "a"),
    ]  # fmt: skip
    assert [point.name for point in eval_points(store)] == ["a#0", "b", "a#2"]


def test_an_answer_of_an_eval_that_was_sampled_again_replaces_the_one_that_failed(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("evals", {"eval_id": "e", "step": 3, "metric": "correct"})
        for sample, item, status in (("a", 0, "masked"), ("a-again", 0, "eval"), ("b", 1, "masked")):
            recorder.write("eval_samples", {"eval_id": "e", "sample_id": sample, "step": 3, "item": item})
            row = {"sample_id": sample, "group_id": -1, "step": 3, "status": status, "metrics": {"correct": 1.0}}
            recorder.write("samples", row)
    rows = eval_samples(RunStore(Run(tmp_path / "run")), 1, "e")
    assert [(row["sample_id"], row["score"]) for row in rows] == [("a-again", 1.0), ("b", None)]


def test_a_cursor_returns_only_later_steps(client):
    first = client.get("/api/runs/below~second/steps").json()
    assert client.get(f"/api/runs/below~second/steps?since={first['next'] - 2}").json()["step"] == [10, 11]
    assert client.get(f"/api/runs/below~second/steps?since={first['next']}").json()["step"] == []


def test_an_unchanged_answer_is_not_sent_again(client):
    tag = client.get("/api/runs/first/steps").headers["etag"]
    assert client.get("/api/runs/first/steps", headers={"If-None-Match": tag}).status_code == 304


def test_compare_lists_only_settings_that_differ(client):
    body = client.get("/api/compare?runs=first,below~second").json()
    assert body["config"] == [{"key": "algorithm", "values": ["grpo", "rloo"], "bookkeeping": False}]
    assert [row["run"] for row in body["attempts"]] == ["first", "below~second"]
    every = client.get("/api/compare?runs=first,below~second&equal=true").json()
    assert [row["key"] for row in every["config"]] == ["model", "algorithm", "environments"]
    assert every["num_differing"] == body["num_differing"] == 1


def test_runs_with_a_comma_in_their_names_are_compared(tmp_path):
    names = ["lr=1e-6,seed=1", "lr=1e-6,seed=2"]
    for name in names:
        write_run(tmp_path / name, "grpo")
    client = client_of(tmp_path)
    assert client.get("/api/compare", params={"runs": names}).json()["runs"] == names


def test_an_unknown_run_and_an_unknown_address_say_so(client):
    assert "no run 'nowhere'" in client.get("/api/runs/nowhere").json()["detail"]
    assert client.get("/api/nothing").status_code == 404
    assert client.get("/api/events?run=nowhere").status_code == 404
    assert client.get("/api/events").status_code == 422
    assert client.get("/api/runs/first/steps?since=-1").status_code == 422


async def test_a_run_whose_folder_was_moved_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "ENDED_SECONDS", 0.0)
    # A search meanwhile would forget the run.
    monkeypatch.setattr("telescope.dashboard.registry.SEARCH_SECONDS", 600.0)
    write_run(tmp_path / "run", "rloo")
    client = client_of(tmp_path)
    assert client.get("/api/runs/run").status_code == 200
    run = Run(tmp_path / "run")
    moved = run.files.run_dir.rename(tmp_path / ".moved")
    for part in ("", "/health", "/steps", "/now"):
        answer = client.get(f"/api/runs/run{part}")
        assert answer.status_code == 404 and "removed or moved" in answer.json()["detail"]
    assert any('"status":"removed"' in event for event in await events_of({"run": run}, None))
    assert client.get("/api/runs?fields=last.entropy").status_code == 200
    moved.rename(run.files.run_dir)
    assert client.get("/api/runs/run").status_code == 200


def test_a_parameter_that_an_address_does_not_have_is_refused(client):
    answer = client.get("/api/runs/first/samples.jsonl?step=5")
    assert answer.status_code == 400
    assert "no parameter 'step'" in answer.json()["detail"]
    assert "step_min" in answer.json()["detail"]


def test_a_folder_that_is_removed_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    client = client_of(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "is not a folder" in client.get("/api/runs").json()["problems"][0]["problem"]


def test_every_address_is_documented_by_subject(client):
    page, schema = client.get("/api/docs").text, client.get("/api/openapi.json").json()
    assert "<script" not in page
    assert all(path in page for path in schema["paths"])
    assert schema["info"]["title"] in page
    assert schema["info"]["description"] in page
    described = {subject["name"] for subject in schema["tags"] if subject["description"] in page}
    operations = [operation for methods in schema["paths"].values() for operation in methods.values()]
    assert {tag for operation in operations for tag in operation["tags"]} == described


async def events_of(runs: dict[str, Run], last_id: str | None) -> list[str]:
    left = iter([False, True])

    async def is_gone() -> bool:
        return next(left)

    return [event.decode() async for event in run_events(runs, last_id, is_gone)]


async def test_events_tell_what_grew_and_nothing_that_is_known(root: Path, monkeypatch):
    monkeypatch.setattr(events, "ENDED_SECONDS", 0.0)
    runs = {"a;b": Run(root / "first"), "second": Run(root / "below" / "second")}
    first = await events_of(runs, None)
    tables = [event for event in first if event.startswith("event: tables")]
    assert '"run":"a;b"' in tables[0] and '"steps":14' in tables[0] and '"run":"second"' in tables[1]
    assert sum('"status":"finished"' in event for event in first) == 2
    known = tables[1].split("id: ")[1].split("\n")[0]
    assert not any(event.startswith("event: tables") for event in await events_of(runs, known))
    sizes = parse_id(known)
    older = json.dumps({**sizes, "a;b": {**sizes["a;b"], "steps": 3}})
    (grown,) = (event for event in await events_of(runs, older) if event.startswith("event: tables"))
    assert '{"run":"a;b","tables":{"steps":14}}' in grown


async def test_a_copy_that_grows_is_reported_while_it_does(root: Path, monkeypatch):
    monkeypatch.setattr(events, "LIVE_SECONDS", 0.0)
    copy = SimpleNamespace(state=None)
    sizes = iter([1, 1, 2, None])

    async def is_gone() -> bool:
        done = next(sizes)
        copy.state = RemoteCopy("syncing", "W&B me/p", done or 0, 3)
        return done is None

    runs = {"first": Run(root / "first")}
    found = [event.decode() async for event in run_events(runs, None, is_gone, {"first": copy})]
    progress = [event.partition("data: ")[2] for event in found if event.startswith("event: remote")]
    assert [json.loads(text)["remote"]["done_bytes"] for text in progress] == [1, 2]


async def test_a_run_that_has_ended_is_looked_at_less_often(root: Path, monkeypatch):
    monkeypatch.setattr(events, "LIVE_SECONDS", 0.001)
    monkeypatch.setattr(events, "ENDED_SECONDS", 0.003)
    states = {"live": "live", "ended": "finished"}
    looks = []
    monkeypatch.setattr(events, "_look", lambda sizes, run: (looks.append(run) or {}, states[run]))
    left = iter([False] * 6 + [True])

    async def is_gone() -> bool:
        return next(left)

    monkeypatch.setattr(events, "TableSizes", lambda run: None)
    async for _ in run_events({name: name for name in states}, None, is_gone):
        pass
    assert (looks.count("live"), looks.count("ended")) == (6, 2)


def test_a_stream_ends_with_its_server(root: Path):
    """uvicorn would cancel it, and print a traceback for each open page."""
    client = client_of(root)
    client.app.state.is_closing = lambda: True
    response = client.get("/api/events?run=first")
    assert response.text.startswith("retry:") and "event:" not in response.text


def test_ids_of_events_that_no_event_had_are_ignored():
    assert [parse_id(text) for text in (None, "", "a:steps=3", "[]", '{"a": {"steps": "x"}}')] == [{}] * 5
    sizes = {"ä~b": {"steps": 3, "logs": 9}, "c": {}}
    assert parse_id(json.dumps(sizes)) == sizes


def test_a_taken_port_leads_to_the_next_free_one():
    first, _ = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    second, is_taken = listen("127.0.0.1", port)
    assert is_taken and second.getsockname()[1] > port
    first.close()
    second.close()


def test_a_host_that_is_not_here_and_a_folder_that_is_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match="is not an address of this machine"):
        listen("192.0.2.1", 8005)
    for gone in (str(tmp_path / "gone"), "./gone", "../gone"):
        with pytest.raises(UserError, match="is neither a folder nor a W&B project"):
            choose_places([gone], None)
    assert address("127.0.0.1", 8005, None) == "http://localhost:8005/"
    assert address("::1", 8005, "secret") == "http://[::1]:8005/?token=secret"
    assert address("127.0.0.1", 8005, None, "a~b c") == "http://localhost:8005/#/a~b%20c/overview"


@pytest.mark.parametrize("end", ["", "/", "/workspace", "?nw=nwuserme", "/sweeps/abc", "/overview#a"])
def test_a_project_is_named_by_any_address_of_it_in_a_browser(end):
    assert choose_places([f"https://wandb.ai/me/math{end}"], None) == ([], [("me", "math")])


def test_a_folder_that_the_first_run_makes_is_shown_without_a_problem(tmp_path):
    client = client_of(tmp_path / "runs")
    list_of_runs = client.get("/api/runs").json()
    assert (list_of_runs["runs"], list_of_runs["problems"]) == ([], [])
    assert list_of_runs["roots"] == [str(tmp_path / "runs")]
    Recorder(tmp_path / "runs" / "first").close()
    client.app.state.registry._searched -= SEARCH_SECONDS
    assert [row["id"] for row in client.get("/api/runs").json()["runs"]] == ["first"]


def test_two_runs_of_one_name_have_two_ids(tmp_path):
    for parent in ("a", "b"):
        Recorder(tmp_path / parent / "run").close()
    client = client_of(tmp_path / "a", tmp_path / "b")
    assert {row["id"] for row in client.get("/api/runs").json()["runs"]} == {"run", "run~2"}
