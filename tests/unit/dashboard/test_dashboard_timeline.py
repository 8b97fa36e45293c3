"""Spans, the paths of steps, gauges and logs, by time, against the rows that were written."""

from collections import Counter

import pytest
from tests.unit.dashboard.conftest import NUM_STEPS, T0, client_of, sample_rows

from telescope.record.log_files import LogFiles
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run


def test_spans_of_a_range_are_columns_with_their_lanes(client):
    body = client.get(f"/api/runs/below~second/spans?start={T0 + 21}&end={T0 + 22}").json()
    assert not body["merged"] and body["step"] == [2] * 16
    assert set(body["lane"]) == {0, 1, 2, 3}
    assert set(zip(body["start"], body["end"], strict=True)) == {(T0 + 20, T0 + 24)}


def test_too_many_spans_are_merged_and_a_slot_shows_one_at_a_time(client):
    body = client.get("/api/runs/below~second/spans?limit=10&buckets=6").json()
    assert body["merged"] and sum(body["count"]) == NUM_STEPS * 4
    assert body["slots"] == {"0": 4}
    assert len(body["count"]) <= 4 * 7
    assert min(body["start"]) == T0


@pytest.mark.parametrize("buckets", [1, 7, 1000])
def test_merged_spans_last_as_long_as_their_slots_show_them(client, root, buckets):
    body = client.get(f"/api/runs/below~second/spans?limit=1&buckets={buckets}").json()
    drawn = Counter()
    for name, start, end in zip(body["name"], body["start"], body["end"], strict=True):
        drawn[name] += end - start
    shown = "select distinct name, attributes['lane'], start, \"end\" from spans"
    found = Run(root / "below" / "second").sql(f'select name, sum("end" - start) from ({shown}) group by name').rows
    assert drawn == pytest.approx(dict(found))


def test_paths_have_the_last_answer_of_each_group_and_at_most_so_many_steps(client):
    body = client.get("/api/runs/below~second/paths?first=0&last=11&most=3").json()
    steps = [0, 4, 8]
    assert [step["step"] for step in body["steps"]] == steps
    kept = {(step, row["group_id"]) for step in steps for row in sample_rows(step) if row["status"] == "kept"}
    assert [(row["step"], row["group_id"]) for row in body["answers"]] == sorted(kept)
    assert {(span["of_step"], span["start"]) for span in body["spans"]} == {(step, T0 + 10 * step) for step in steps}


def test_times_of_sandboxes_are_apart_from_those_of_requests(client):
    last = T0 + 10 * (NUM_STEPS - 1)
    rows = client.get(f"/api/runs/first/sandboxes?start={last + 1}").json()
    assert [(row["name"], row["count"]) for row in rows] == [("exec", 2), ("destroy", 1), ("queue", 1)]
    assert (rows[0]["p50"], rows[0]["p95"]) == (pytest.approx(0.3), pytest.approx(0.39))
    sample = sample_rows(NUM_STEPS - 1)[0]["sample_id"]
    body = client.get(f"/api/runs/first/samples/2/{sample}").json()
    assert [span["name"] for span in body["spans"]] == ["generate"]
    used = [(span["name"], span["sandbox"], span["error"]) for span in body["sandbox_spans"]]
    errors = [None, None, "SandboxCommandTimeoutError"]
    assert used == [(name, "local-7f", error) for name, error in zip(("queue", "exec", "exec"), errors, strict=True)]
    assert body["tool_calls"][0]["sandbox"] == "local-7f"
    assert "sandbox" not in client.get("/api/runs/first/spans?limit=1&buckets=7").json()["component"]
    paths = client.get(f"/api/runs/first/paths?first=0&last={NUM_STEPS}&most=20").json()
    assert {span["component"] for span in paths["spans"]} == {"rollout", "sandbox"}


def test_gauges_have_smallest_mean_and_largest_reading_of_each_part(client):
    (gauge,) = client.get("/api/runs/below~second/gauges/names").json()
    assert gauge == {"name": "queue_depth", "component": "orchestrator", "series": 1}
    (series,) = client.get("/api/runs/below~second/gauges?names=queue_depth&points=2").json()
    assert (series["min"], series["mean"], series["max"]) == ([0, 6], [2.5, 8.5], [5, 11])
    assert series["time"] == [T0 + 50, T0 + 110]


def test_a_gauge_has_no_reading_between_two_attempts(tmp_path):
    for attempt, start in enumerate((0.0, 500.0), 1):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=9)
            for name, seconds in (("lanes_used", 4.0), ("load_average_1m", 9.0)):
                for time in (start + 1, start + seconds):
                    recorder.write("gauges", {"time": time, "name": name, "component": "host", "value": 5.0})
    with client_of(tmp_path) as client:
        (series,) = client.get("/api/runs/run/gauges?names=lanes_used").json()
        (one,) = client.get("/api/runs/run/gauges?names=lanes_used&end=100").json()
    assert series["mean"] == [5, 5, None, 5, 5]
    assert series["time"] == pytest.approx([1, 4, 9, 501, 504], abs=0.01)
    assert one["mean"] == [5, 5, None]


def test_logs_are_paged_filtered_and_followed(client):
    run = "/api/runs/below~second/logs"
    newest = client.get(f"{run}?limit=3").json()
    assert [row["message"] for row in newest["rows"]] == ["step 9 of it", "step 10 of it", "step 11 of it"]
    older = client.get(f"{run}?limit=2&before={newest['rows'][0]['row']}").json()
    assert [row["message"] for row in older["rows"]] == ["step 7 of it", "step 8 of it"]
    assert client.get(f"{run}?since={newest['next']}").json()["rows"] == []
    assert len(client.get(f"{run}?search=STEP 1").json()["rows"]) == 3
    assert client.get(f"{run}?level=WARNING").json()["rows"] == []
    assert client.get(f"{run}?level=LOUD").status_code == 400
    around = client.get(f"{run}?at={T0 + 5}&limit=4").json()
    assert [row["time"] - T0 for row in around["rows"]] == [3, 4, 5, 6]
    later = client.get(f"{run}?after={around['rows'][-1]['row']}&limit=1").json()
    assert [row["time"] - T0 for row in later["rows"]] == [7]
    late = client.get(f"{run}?at={T0 + 99}&limit=4").json()
    assert [row["time"] - T0 for row in late["rows"]] == [10, 11]
    assert client.get(f"{run}?since={late['next']}").json()["rows"] == []
    within = client.get(f"{run}?start={T0 + 2}&end={T0 + 4}").json()
    assert [row["time"] - T0 for row in within["rows"]] == [2, 3]
    odd = client.get(f"{run}?source=driver-1.log").json()
    assert [row["message"] for row in odd["rows"]] == [f"step {step} of it" for step in range(1, NUM_STEPS, 2)]
    assert (odd["components"], odd["sources"]) == (["driver"], ["driver-0.log", "driver-1.log"])
    first = client.get(f"{run}?since=0&limit=5").json()
    assert client.get(f"{run}?since={first['next']}&limit=5").json()["rows"][0]["message"] == "step 5 of it"


def test_a_log_filter_chooses_one_process_or_all_of_a_kind(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    with Recorder(run_dir) as recorder:
        files = LogFiles(run_dir, recorder.write)
        for name in ("trainer-1", "trainer-10", "inference-0", "environment-0", "environment-server"):
            (run_dir / "logs" / f"{name}.log").write_text(f"of {name}\n")
        files.poll(T0, last=True)
    client = client_of(tmp_path)

    def lines(component: str) -> list[str]:
        return [row["message"] for row in client.get(f"/api/runs/run/logs?component={component}").json()["rows"]]

    assert lines("trainer-1") == ["of trainer-1"]
    assert lines("trainer") == ["of trainer-1", "of trainer-10"]
    assert lines("environment") == ["of environment-0", "of environment-server"]
    assert client.get("/api/runs/run/logs").json()["components"] == [
        *("environment", "environment-0", "environment-server", "inference-0", "trainer", "trainer-1", "trainer-10")
    ]


def test_logs_are_in_the_order_of_time_whenever_they_were_recorded(tmp_path):
    times = [3, 1, None, 2, 2, 9, 4, 8]
    with Recorder(tmp_path / "run") as recorder:
        client = client_of(tmp_path)

        def page(**query: float) -> list[tuple[float | None, int]]:
            rows = client.get("/api/runs/run/logs", params=query).json()["rows"]
            return [(row["time"] and row["time"] - T0, row["row"]) for row in rows]

        for time in times[:6]:
            recorder.write("logs", {"time": time and T0 + time, "message": "m"})
        recorder.flush()
        assert page() == [(None, 2), (1, 1), (2, 3), (2, 4), (3, 0), (9, 5)]
        for time in times[6:]:
            recorder.write("logs", {"time": T0 + time, "message": "m"})
        recorder.flush()
        assert page(since=6) == [(4, 6), (8, 7)], "what was recorded meanwhile, with lines before the newest one"
    every = [(None, 2), (1, 1), (2, 3), (2, 4), (3, 0), (4, 6), (8, 7), (9, 5)]
    pages = [page(limit=3)]
    while pages[0][0] != every[0]:
        pages.insert(0, page(limit=3, before=pages[0][0][1]))
    assert [row for rows in pages for row in rows] == every
    pages = [page(limit=3, at=T0 + 2)]
    while last := pages[-1]:
        pages.append(page(limit=3, after=last[-1][1]))
    assert [row for rows in pages for row in rows] == every[1:]
