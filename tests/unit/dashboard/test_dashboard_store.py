"""The tables in memory: new rows, damaged files, replaced runs, and requests at the same time."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import duckdb
import pytest
from tests.unit.dashboard.conftest import NUM_GROUPS, client_of, hold, write_run, write_step

from telescope.dashboard import registry
from telescope.dashboard.store import RunStore, key_of
from telescope.record.query import block_rows
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run


def test_only_new_rows_are_read_of_a_table_that_has_changed(root, monkeypatch):
    store = RunStore(Run(root / "first"))
    num_rows = store.refresh("samples")["samples"]
    cursors = []
    read = Run.rows_since
    monkeypatch.setattr(store.run, "rows_since", lambda name, at, _: cursors.append(at) or read(store.run, name, at))
    assert store.refresh("samples")["samples"] == num_rows > 0
    assert cursors == []
    newest = max((root / "first" / "tables" / "samples").iterdir())
    os.utime(newest, ns=(0, 0))
    assert store.refresh("samples")["samples"] == num_rows
    assert cursors == [num_rows]


def test_a_value_is_made_once_for_all_requests_until_its_state_changes(root):
    store, made = RunStore(Run(root / "first")), []
    store.refresh("samples")

    def make() -> int:
        time.sleep(0.05)  # in which the other requests ask
        made.append(None)
        return len(made)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: store.kept("number", 0, make), range(4))) == [1] * 4
    keys = [("number", 0), ("number", 5), ("number", 5), ("other", 5)]
    assert [store.kept(*key, make) for key in keys] == [1, 2, 2, 3]


def test_a_list_of_runs_opens_no_database(root, monkeypatch):
    monkeypatch.setattr(duckdb, "connect", None)
    assert [row["steps"] for row in client_of(root).get("/api/runs").json()["runs"]] == [12, 12]


def test_a_folder_that_cannot_be_read_is_named_once(root, monkeypatch):
    monkeypatch.setattr(Run, "summary", Mock(side_effect=OSError("not now")))
    client = client_of(root)
    problems = [client.get("/api/runs").json()["problems"] for _ in range(2)]
    assert [row["problem"] for row in problems[0]] == ["not now"] * 2 and problems[1] == problems[0]


def test_a_search_of_a_growing_run_sees_later_answers_and_keeps_each_hit_once(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        client, store = client_of(tmp_path), RunStore(Run(tmp_path / "run"))
        for step in range(3):
            write_step(recorder, step)
            assert recorder.flush()
            assert client.get("/api/runs/run/samples?search=answer_1").json()["total"] == 4 * (step + 1)
            hits = store.search("answer_1")["id"].to_pylist()
            assert len(hits) == len(set(hits)) == 4 * (step + 1)


def test_a_run_that_was_replaced_is_read_from_the_start(tmp_path):
    write_run(tmp_path / "run", "grpo", resumed=True)
    client = client_of(tmp_path)
    assert client.get("/api/runs/run/samples").json()["total"] == 192
    shutil.rmtree(tmp_path / "run")
    with Recorder(tmp_path / "run") as recorder:
        write_step(recorder, 0)
    assert client.get("/api/runs/run/samples").json()["total"] == 16
    assert client.get("/api/runs/run/steps").json()["step"] == [0]


def test_a_damaged_file_is_left_out_and_named(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        write_step(recorder, 0)
    (file,) = Run(tmp_path / "run").table_files("samples")
    file.path.write_bytes(file.path.read_bytes()[:-20])
    client = client_of(tmp_path)
    assert client.get("/api/runs/run/samples?search=answer").json()["total"] == 0
    assert client.get("/api/runs/run/steps").json()["step"] == [0]
    name = file.path.relative_to(tmp_path / "run").as_posix()
    assert client.get("/api/runs").json()["problems"][0]["problem"] == f"These files cannot be read: {name}"
    assert client.get("/api/runs/run").json()["unreadable"] == [name]


def test_new_lines_of_a_log_follow_also_after_a_damaged_file(tmp_path):
    def write(message):
        with Recorder(tmp_path / "run") as recorder:
            recorder.write("logs", {"time": time.time(), "message": message})

    write("first")
    (file,) = Run(tmp_path / "run").table_files("logs")
    write("second")
    file.path.write_bytes(file.path.read_bytes()[:-20])
    client = client_of(tmp_path)
    shown = client.get("/api/runs/run/logs").json()
    write("third")
    news = client.get(f"/api/runs/run/logs?since={shown['next']}").json()["rows"]
    assert [row["message"] for row in news] == ["third"]


def write_blocks(run_dir, num_blocks):
    for step in range(num_blocks):
        with Recorder(run_dir) as recorder:
            write_step(recorder, step)
    assert len(Run(run_dir).table_files("turns")) == num_blocks


def test_one_sample_is_read_from_one_file_of_a_table(tmp_path, monkeypatch):
    write_blocks(tmp_path / "run", 3)
    store = RunStore(Run(tmp_path / "run"))
    opened = []
    read = lambda name, blocks: opened.append(len(blocks)) or block_rows(name, blocks)  # noqa: E731
    monkeypatch.setattr("telescope.dashboard.store.block_rows", read)
    for row in Run(tmp_path / "run").table("samples").to_pylist():
        store.refresh("turns")
        opened.clear()
        (turn,) = store.of_samples("turns", [key_of(row)])[key_of(row)]
        index, group = row["sample_index"], row["group_id"] % NUM_GROUPS
        assert (turn["text"], opened) == (f"the answer_{index} of group {group} is Straße", [1])
    assert store.of_samples("turns", [(1, "unknown")]) == {(1, "unknown"): []}


def test_a_sample_is_found_when_an_earlier_file_is_lost(tmp_path):
    write_blocks(tmp_path / "run", 3)
    (first, *_) = Run(tmp_path / "run").table_files("turns")
    first.path.unlink()
    client = client_of(tmp_path)
    for row in client.get("/api/runs/run/samples").json()["rows"]:
        turns = client.get(f"/api/runs/run/samples/{row['attempt']}/{row['sample_id']}").json()["turns"]
        assert [turn["text"] for turn in turns] == ([] if row["step"] == 0 else [row["completion"]])


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_completed_or_arrives_while_the_run_is_copied_is_shown(tmp_path, monkeypatch, is_there):
    monkeypatch.setattr("telescope.dashboard.registry.SEARCH_SECONDS", 0.0)
    write_blocks(tmp_path / "run", 3)
    late = list(Run(tmp_path / "run").table_files("samples"))[1].path
    content = late.read_bytes()
    late.write_bytes(content[: len(content) // 2])
    if not is_there:
        late.unlink()
    client = client_of(tmp_path)
    assert client.get("/api/runs/run/samples").json()["total"] == 32
    assert client.get("/api/runs").json()["problems"]
    late.write_bytes(content)
    assert client.get("/api/runs").json()["problems"] == []
    assert client.get("/api/runs/run/samples").json()["total"] == 48


def test_steps_that_a_power_failure_lost_are_not_shown_and_do_not_hide_those_after_them(tmp_path):
    write_blocks(tmp_path / "run", 3)
    store = RunStore(Run(tmp_path / "run"))
    assert store.steps()[1]["step"] == [0, 1, 2]
    list(store.run.table_files("steps"))[-1].path.unlink()
    assert store.steps()[1]["step"] == [0, 1]
    with Recorder(tmp_path / "run", attempt=2) as recorder:
        for step in (2, 3):
            write_step(recorder, step)
    assert store.steps()[1]["step"] == [0, 1, 2, 3]


def test_tables_stay_in_memory_while_run_json_is_overwritten(tmp_path):
    write_run(tmp_path / "run", "grpo")
    store = RunStore(Run(tmp_path / "run"))
    num_rows = store.refresh("samples")["samples"]
    path = store.run.files.run_json
    content = path.read_text()
    for text in (content[:20], content):
        path.write_text(text)
        store.refresh("steps")
        assert store.fetch("SELECT count(*) FROM samples") == [(num_rows,)]


def test_a_run_with_other_types_in_its_run_json_is_listed_and_named(tmp_path):
    write_run(tmp_path / "run", "grpo")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"attempt": ', '"attempt": "one", "was": '))
    with client_of(tmp_path) as client:
        answer = client.get("/api/runs").json()
    assert [run["status"] for run in answer["runs"]] == ["unknown"]
    assert "run.json cannot be read" in answer["problems"][0]["problem"]


@pytest.mark.parametrize("config", ["1: 2\na: {1: 2, b: 3}\nenvironments: 3\n? [4, 5]\n: 6", "&a [*a]", "[" * 20_000])
def test_a_config_of_another_program_hides_no_runs(tmp_path, config):
    write_run(tmp_path / "run", "grpo")
    (tmp_path / "thesis" / "tables").mkdir(parents=True)
    (tmp_path / "thesis" / "config.yaml").write_text(config)
    client = client_of(tmp_path)
    assert {row["id"] for row in client.get("/api/runs").json()["runs"]} == {"run", "thesis"}
    for path in ("runs?fields=config.1", "runs/thesis", "fields", "compare?runs=run,thesis"):
        assert client.get(f"/api/{path}").status_code == 200, path


def test_an_empty_run_has_empty_pages(tmp_path):
    Recorder(tmp_path / "run").close()
    client = client_of(tmp_path)
    assert client.get("/api/runs/run/health").json()["verdict"][0]["text"] == "No step has ended yet."
    paths = "/steps /samples /groups?step=0 /spans /gauges?names=x /gauges/names /logs /evals"
    for path in ("", *paths.split()):
        assert client.get(f"/api/runs/run{path}").status_code == 200, path
    assert client.get("/api/runs/run/distribution").json()["step"] == []


def test_a_prompt_without_messages_does_not_hide_the_answers(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("prompts", {"prompt_key": "p", "environment": "e", "text": "asked"})
        recorder.write("samples", {"sample_id": "0-0", "prompt_key": "p", "environment": "e", "step": 0})
    client = client_of(tmp_path)
    assert [row["sample_id"] for row in client.get("/api/runs/run/samples").json()["rows"]] == ["0-0"]
    detail = client.get("/api/runs/run/samples/1/0-0").json()
    assert (detail["prompt_text"], detail["messages"]) == ("asked", [])


def test_a_table_that_is_being_read_delays_no_other(root, monkeypatch):
    store = RunStore(Run(root / "first"))
    reads, go_on = hold(monkeypatch, store, "_read_blocks", "samples")
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(store.refresh, "samples")
        assert reads.wait(30)
        assert len(store.steps()[1]["step"]) == 12
        assert not samples.done()
        go_on.set()
        assert samples.result()["samples"] > 0


def test_requests_at_the_same_time_do_not_mix(root):
    client = client_of(root)
    texts = [f"search=make {step} of" for step in range(12)] * 2

    def ask(query):
        return {row["step"] for row in client.get(f"/api/runs/first/samples?limit=100&{query}").json()["rows"]}

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, texts)) == [{step} for step in range(12)] * 2


def test_tags_of_new_samples_are_added_and_ids_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("telescope.dashboard.tables.MOST_TAG_VALUES", 4)
    with Recorder(tmp_path / "run") as recorder:
        client = client_of(tmp_path)
        assert client.get("/api/runs/run/tags").json() == {}
        for values, expected in ((["b", "a"], ["a", "b"]), (["c"], ["a", "b", "c"]), (["d", "e"], [])):
            for value in values:
                recorder.write("samples", {"sample_id": value, "step": 0, "tags": {"level": value}})
            assert recorder.flush()
            assert client.get("/api/runs/run/tags").json() == {"level": expected}


def test_gauges_of_new_rows_are_added_to_the_known_ones(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        client = client_of(tmp_path)
        for gpu, series in ((0, 1), (1, 2), (1, 2)):
            recorder.write("gauges", {"time": 1.0, "name": "power", "component": "gpu", "gpu": gpu, "value": 1.0})
            assert recorder.flush()
            expected = [{"name": "power", "component": "gpu", "series": series}]
            assert client.get("/api/runs/run/gauges/names").json() == expected


def test_a_name_that_is_no_unicode_does_not_hide_the_runs(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        begin_run(recorder, name="half \ud800", config_hash="c", config_json="{}", first_step=0, num_steps=1)
    assert [row["name"] for row in client_of(tmp_path).get("/api/runs").json()["runs"]] == ["half ?"]


@pytest.fixture
def three(tmp_path):
    """Requests to the runs `a`, `b` and `c`, and their registry."""
    for name in "abc":
        with Recorder(tmp_path / name) as recorder:
            write_step(recorder, 0)
    client = client_of(tmp_path)
    return client, client.app.state.registry


def opened(runs):
    return {run_id for run_id, store in runs.stores().items() if store.is_open}


def ask(client, *runs):
    for run in runs:
        assert client.get(f"/api/runs/{run}/samples").json()["total"] == 16


def test_the_runs_that_were_used_longest_ago_are_closed(three, monkeypatch):
    client, runs = three
    monkeypatch.setattr(registry, "MAX_OPENED", 2)
    monkeypatch.setattr(registry, "IDLE_SECONDS", -1.0)
    ask(client, "a", "b", "a", "c")
    assert opened(runs) == {"a", "c"}
    ask(client, "b")
    assert opened(runs) == {"b", "c"}


def test_a_run_that_was_just_used_stays_open(three, monkeypatch):
    client, runs = three
    monkeypatch.setattr(registry, "MAX_OPENED", 1)
    ask(client, "a", "b", "c")
    assert opened(runs) == {"a", "b", "c"}


def test_the_list_of_runs_opens_none(three):
    client, runs = three
    client.get("/api/runs?fields=last.entropy")
    assert opened(runs) == set()
