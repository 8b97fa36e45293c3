"""Groups, samples, distributions, evals, spans, gauges and logs, against numbers from the rows that were written."""

import json
import math
import statistics
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tests.unit.dashboard.conftest import NUM_STEPS, SAMPLES_PER_GROUP, T0, sample_rows

from telescope.dashboard import curves, rollouts, samples, store
from telescope.dashboard.app import create_app
from telescope.dashboard.rollouts import add_tokens
from telescope.dashboard.samples import _edges
from telescope.orchestrator.step_stats import distribution
from telescope.record.log_files import LogFiles
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run

RUN = "/api/runs/first"
ALL = [row for step in range(NUM_STEPS) for row in sample_rows(step)]


def test_groups_of_a_step_have_their_samples_and_say_why_they_were_discarded(client):
    groups = client.get(f"{RUN}/groups?step=4").json()
    assert [group["id"] for group in groups] == [16, 17, 18, 19]
    assert [group["reason"] for group in groups] == [None, None, None, "zero_advantage"]
    assert groups[0]["prompt"].endswith("Make 4 of 100 % of the numbers<|im_end|>\n")
    expected = [(row["sample_id"], row["reward"], row["completion_tokens"]) for row in sample_rows(4)[:4]]
    assert [(one["id"], one["reward"], one["length"]) for one in groups[0]["samples"]] == expected
    assert groups[0]["samples"][1]["completion"] == "the answer_1 of group 0 is Straße"


def test_groups_of_superseded_steps_are_hidden(client):
    assert {group["attempt"] for group in client.get(f"{RUN}/groups?step=11").json()} == {2}


def test_pages_and_queries_agree_on_the_samples_of_a_step(tmp_path):
    """Of a prompt that was requeued at step 1 and trained at 2, and of what an attempt that begins at 2 supersedes."""
    name = {"group_id": 7, "environment": "e"}
    for attempt, first_step in ((1, 0), (2, 2)):
        with Recorder(tmp_path / "run", attempt=attempt) as recorder:
            begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=first_step, num_steps=3)
            opened = [(1, "discarded", "max_async")] * (attempt == 1) + [(2, "kept", None)]
            for step, status, reason in opened:
                for index in range(2):
                    fate = {"step": step, "status": status, "reason": reason, "reward": float(index)}
                    recorder.write("samples", {**name, **fate, "sample_id": f"{step}-{index}", "sample_index": index})
            recorder.write("groups", {**name, "step": 2, "status": "kept"})
    client = TestClient(create_app([tmp_path]), base_url="http://localhost")
    queried = Run(tmp_path / "run").sql("select attempt, step, sample_id, status, reason from samples").to_dicts()
    shown = [
        {"attempt": group["attempt"], "step": step, "sample_id": sample["id"], "status": group["status"],
         "reason": group["reason"]}
        for step in range(3)
        for group in client.get(f"/api/runs/run/groups?step={step}").json()
        for sample in group["samples"]
    ]  # fmt: skip
    assert shown == queried
    assert [(row["attempt"], row["step"]) for row in shown] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert client.get("/api/runs/run/samples").json()["total"] == len(queried)


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        ("", lambda row: True),
        ("status=kept", lambda row: row["status"] == "kept"),
        ("status=kept,discarded&reward=1", lambda row: row["reward"] == 1),
        ("environment=wordle&stop_reason=length", lambda row: row["group_id"] % 2 and row["sample_index"] == 3),
        ("step_min=3&step_max=5", lambda row: 3 <= row["step"] <= 5),
        ("search=ANSWER_2", lambda row: row["sample_index"] == 2),
        ("search=100 %25 of", lambda row: True),
        ("search=1_0 %25", lambda row: False),
        ("search=strasse", lambda row: False),
        ("search=make 7 of&status=kept", lambda row: row["step"] == 7 and row["status"] == "kept"),
        ("search=' OR 1=1 --", lambda row: False),
        ("environment=a' OR '1'='1", lambda row: False),
        ("tag=level%3D1&tag=level%3D2", lambda row: row["tags"]["level"] in "12"),
        ("tag=level%3D1&tag=none%3Dx", lambda row: False),
        ("tag=a' OR '1'='1%3Dx", lambda row: False),
        ("range=completion_tokens%3D20..30", lambda row: 20 <= row["completion_tokens"] <= 30),
        ("range=correct%3D0.5..&range=step_none%3D..1", lambda row: False),
        ("range=correct%3D0.5..&tag=level%3D0", lambda row: row["reward"] > 0.5 and row["tags"]["level"] == "0"),
        ("range=advantage%3D..-0.5", lambda row: row["advantage"] is not None and row["advantage"] <= -0.5),
    ],
)  # fmt: skip
def test_filters_and_search_find_what_a_loop_over_the_rows_finds(client, query, passes):
    body = client.get(f"{RUN}/samples?limit=1000&{query}").json()
    expected = {row["sample_id"] for row in ALL if passes(row)}
    assert {row["sample_id"] for row in body["rows"]} == expected
    assert body["total"] == len(expected)


def test_facets_count_the_search_without_their_own_filter(client):
    body = client.get(f"{RUN}/samples?status=kept&step_max=0").json()
    counts = {name: {one["value"]: one["count"] for one in values} for name, values in body["facets"].items()}
    assert counts["status"] == {"discarded": SAMPLES_PER_GROUP, "kept": 3 * SAMPLES_PER_GROUP}
    assert counts["environment"] == {"countdown": 8, "wordle": 4}
    assert sum(counts["reward"].values()) == 12
    assert counts["tag:level"] == {"0": 4, "1": 4, "2": 4, "3": 0}
    body = client.get(f"{RUN}/samples?tag=level%3D3&step_max=0").json()
    assert [one["count"] for one in body["facets"]["tag:level"]] == [4, 4, 4, 4] and body["total"] == 4


def test_a_prompt_has_the_pass_rate_of_its_answers_by_step(client):
    few = "tag=level%3D0&tag=level%3D1"
    chosen = [row for row in ALL if row["tags"]["level"] in "01"]
    body = client.get(f"{RUN}/prompts?limit=1000&{few}").json()
    expected = Counter((row["environment"], row["step"]) for row in chosen)
    right = Counter((row["environment"], row["step"]) for row in chosen if row["reward"] == 1)
    found = {(row["environment"], row["first_step"]): row for row in body["rows"]}
    assert {key: row["n"] for key, row in found.items()} == expected
    assert {key: row["num_right"] for key, row in found.items()} == {key: right[key] for key in expected}
    assert body["never"] == sum(not right[key] for key in expected) > 0
    assert body["total"] == body["never"] + body["sometimes"] + body["always"] == len(expected)
    never = client.get(f"{RUN}/prompts?mark=never&{few}&sort=-first_step").json()["rows"]
    assert [row["num_right"] for row in never] == [0] * body["never"]
    assert [row["first_step"] for row in never] == sorted((row["first_step"] for row in never), reverse=True)
    one = found["countdown", 4]
    assert (one["steps"], one["counts"], one["rights"]) == ([4], [4], [right["countdown", 4]])
    assert one["prompt"].endswith("Make 4 of 100 % of the numbers<|im_end|>\n")


def test_a_prompt_has_one_key_in_all_runs_and_leads_to_its_answers(client):
    key = client.get(f"{RUN}/samples/1/16-0").json()["prompt_key"]
    for run in ("first", "below~second"):
        rows = client.get(f"/api/runs/{run}/samples?prompt={key}").json()["rows"]
        assert {(row["environment"], row["step"]) for row in rows} == {("countdown", 4)} and len(rows) == 8


def test_a_hit_shows_what_is_around_it_and_orders_do_not_depend_on_the_list(client):
    page = client.get(f"{RUN}/samples?search=OF GROUP 1&limit=1000").json()
    assert {row["snippet"] for row in page["rows"]} == {
        f"the answer_{index} of group 1 is Straße" for index in range(SAMPLES_PER_GROUP)
    }
    nothing = client.get(f"{RUN}/samples?search=nowhere").json()
    assert nothing["rows"] == [] and nothing["metrics"] == page["metrics"] == ["correct"]


def test_answers_with_recorded_tokens_have_the_sum_of_their_logprobs(client):
    sample = client.get(f"{RUN}/groups?step=4").json()[0]["samples"][0]
    assert (sample["logprob_sum"], sample["ratio"]) == (None, 1.0)  # a logprob of the fixture is not a number


@pytest.mark.parametrize("query", ["mark=often", "sort=prompt_text"])
def test_an_unknown_mark_or_order_of_prompts_is_refused(client, query):
    assert client.get(f"{RUN}/prompts?{query}").status_code == 400


def test_a_list_leaves_out_what_all_prompts_begin_with():
    same = "Solve this riddle with the given numbers: "
    assert samples._elided(f"<|im_start|>user\n{same}1 2", f"<|im_start|>user\n{same}") == "<|im_start|>user\n… 1 2"
    assert samples._elided("Add 1 and 2", "Add 1 and ") == "Add 1 and 2"
    assert samples._same("abd", "abe") == "ab"


def test_rows_and_counts_can_be_asked_for_one_by_one(client):
    both = client.get(f"{RUN}/samples?status=kept&limit=5").json()
    assert client.get(f"{RUN}/samples?status=kept&limit=5&facets=false").json() == {**both, "facets": {}}
    assert client.get(f"{RUN}/samples?status=kept&limit=0").json() == {**both, "rows": []}


def test_samples_are_sorted_and_paged(client):
    expected = sorted((row["completion_tokens"] for row in ALL), reverse=True)
    pages = [client.get(f"{RUN}/samples?sort=-completion_tokens&limit=50&offset={first}").json() for first in (0, 50)]
    assert [row["completion_tokens"] for page in pages for row in page["rows"]] == expected[:100]
    first = pages[0]["rows"][0]
    assert "prompt_text" not in first
    assert first["completion"].startswith(f"the answer_{first['sample_index']}")
    assert client.get(f"{RUN}/samples?sort=prompt_text").status_code == 400


def test_samples_are_sorted_by_a_metric_of_the_environment(client):
    rows = client.get(f"{RUN}/samples?sort=-metric:correct&limit=200").json()["rows"]
    assert [row["metrics"]["correct"] for row in rows] == sorted((row["reward"] for row in ALL), reverse=True)


@pytest.mark.parametrize("piece", [7, 2000])
def test_an_export_has_the_whole_rows_of_the_selection_in_the_order_of_the_record(client, monkeypatch, piece):
    monkeypatch.setattr(store, "EXPORTED_AT_ONCE", piece)
    answer = client.get(f"{RUN}/samples.jsonl?search=answer_1&status=kept")
    rows = [json.loads(line) for line in answer.text.splitlines()]
    expected = [row for row in ALL if row["sample_index"] == 1 and row["status"] == "kept"]
    assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in expected]
    for name in ("prompt_text", "completion_text", "golden", "metrics", "tags", "reward"):
        assert [row[name] for row in rows] == [row[name] for row in expected]
    assert answer.headers["x-total-count"] == str(len(expected))
    assert 'filename="first-samples.jsonl"' in answer.headers["content-disposition"]


def test_a_limited_export_has_the_first_of_the_order_and_says_how_many_there_are(client):
    answer = client.get(f"{RUN}/samples.jsonl?sort=-completion_tokens&limit=5")
    lengths = sorted(json.loads(line)["completion_tokens"] for line in answer.text.splitlines())
    assert lengths == sorted(row["completion_tokens"] for row in ALL)[-5:]
    assert answer.headers["x-total-count"] == str(len(ALL))


def test_an_export_of_nothing_is_empty(client):
    assert client.get(f"{RUN}/samples.jsonl?search=nowhere").text == ""


def test_samples_in_flight_are_those_of_a_live_run(tmp_path):
    row = {"group_id": 3, "environment": "wordle", "start_version": 2, "prompt_tokens": 9, "server": 1, "lane": 4}
    with Recorder(tmp_path / "run") as recorder:
        client = TestClient(create_app([tmp_path]), base_url="http://localhost")
        assert client.get("/api/runs/run/in_flight").json() == []
        recorder.set_in_flight(
            [{**row, "sample_id": f"3-{i}", "sample_index": i, "started_at": T0 - i} for i in range(2)]
        )
        assert recorder.flush()
        found = client.get("/api/runs/run/in_flight").json()
    assert [one["sample_id"] for one in found] == ["3-1", "3-0"]
    assert found[0] == {**row, "attempt": 1, "sample_id": "3-1", "sample_index": 1, "started_at": T0 - 1}
    assert client.get("/api/runs/run/in_flight").json() == []


def test_a_search_keeps_no_other_request_waiting(root, monkeypatch):
    client = TestClient(create_app([root]), base_url="http://localhost")
    scanning, done = threading.Event(), threading.Event()
    matches = store._matches

    def slow(*arguments):
        scanning.set()
        assert done.wait(30)
        return matches(*arguments)

    monkeypatch.setattr(store, "_matches", slow)
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(client.get, f"{RUN}/samples?search=answer_2")
        assert scanning.wait(30)
        assert client.get(f"{RUN}/samples?status=kept").json()["total"] == len(ALL) * 3 // 4
        done.set()
        assert search.result().json()["total"] == len(ALL) // 4


def test_a_list_over_many_steps_of_a_large_record_reads_no_texts(client, monkeypatch):
    monkeypatch.setattr(samples, "SMALL_BYTES", 0)
    monkeypatch.setattr(samples, "NEAR_STEPS", 1)
    assert client.get(f"{RUN}/samples?limit=500").json()["rows"][0]["completion"] == ""
    assert client.get(f"{RUN}/samples?step_min=3&step_max=4").json()["rows"][0]["completion"].startswith("the answer")


def test_a_sample_has_its_texts_turns_and_times(client):
    body = client.get(f"{RUN}/samples/1/5-2").json()
    row = next(row for row in ALL if row["sample_id"] == "5-2")
    for name in ("prompt_text", "completion_text", "golden", "metrics", "tags", "reward", "advantage", "lane"):
        assert body[name] == row[name]
    assert body["turns"][0]["logprobs"] == [pytest.approx(-0.1), pytest.approx(-0.2), None]
    times = {"start": row["started_at"], "end": row["generated_at"], "first_token_seconds": 0.25}
    assert body["spans"] == [{"name": "generate", **times}]
    assert client.get(f"{RUN}/samples/1/no").status_code == 404
    assert client.get(f"{RUN}/samples/1/40-0").status_code == 404, "superseded by attempt 2"


def test_tokens_of_training_sequences_go_to_the_answers_that_sampled_them():
    turns = [
        {"role": "assistant", "num_tokens": 2},
        {"role": "tool", "num_tokens": 1},
        {"role": "assistant", "num_tokens": 1},
    ]
    numbers = {name: [0.0, 0.1, 0.2, 0.3, 0.4] for name in ("engine_logprobs", "trainer_logprobs", "entropies")}
    sequence = {
        "token_ids": [9, 1, 2, 8, 3],
        "versions": [-1, 4, 4, -1, 5],
        "trained": [False, True, True, False, True],
    }
    add_tokens(turns, [{**sequence, **numbers}])
    assert (turns[0]["token_ids"], turns[0]["versions"], turns[2]["token_ids"]) == ([1, 2], [4, 4], [3])
    assert turns[2]["entropies"] == [0.4] and "token_ids" not in turns[1]


def test_tokens_have_texts_where_the_tokenizer_is_on_this_machine(client, monkeypatch, tmp_path):
    assert "tokens" not in client.get(f"{RUN}/samples/1/5-2").json()["turns"][0]
    monkeypatch.setattr(rollouts, "find_tokenizer", lambda run_dir, model: tmp_path)
    monkeypatch.setattr(rollouts, "token_texts", lambda path, ids: [f"<{token}>" for token in ids])
    (turn,) = [turn for turn in client.get(f"{RUN}/samples/1/5-2").json()["turns"] if turn["token_ids"]]
    assert turn["tokens"] == [f"<{token}>" for token in turn["token_ids"]]


def test_ranges_of_a_facet_cover_all_rewards():
    edges = _edges(-0.37, 2.91)
    assert edges[0] <= -0.37 and edges[-1] >= 2.91 and edges[1] - edges[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("metric", "environment"), [("reward", ""), ("completion_tokens", "wordle"), ("sample_metrics/correct", "")]
)
def test_distributions_equal_those_of_numpy(client, metric, environment):
    body = client.get(f"{RUN}/distribution", params={"metric": metric, "environment": environment}).json()
    assert body["step"] == list(range(NUM_STEPS))
    for step in (0, 7, 11):
        kept = [row for row in sample_rows(step) if row["status"] == "kept" and environment in ("", row["environment"])]
        values = [row["reward"] if metric != "completion_tokens" else row["completion_tokens"] for row in kept]
        assert body["n"][step] == len(values)
        assert body["std"][step] == pytest.approx(statistics.stdev(values))
        for p in (5, 25, 50, 75, 95):
            assert body[f"p{p}"][step] == pytest.approx(np.percentile(values, p))


def test_a_distribution_of_a_tag_is_computed_from_its_samples(client):
    parameters = {"metric": "completion_tokens", "tag": "level=1", "histogram": "true"}
    body = client.get(f"{RUN}/distribution", params=parameters).json()
    values = [row["completion_tokens"] for row in sample_rows(4) if row["tags"]["level"] == "1"]
    expected = distribution(np.array(values), np.zeros(len(values)))
    for name in ("n", "mean", "p5", "gini", "histogram"):
        assert body[name][4] == pytest.approx(expected[name]), name
    assert (body["low"][4], body["high"][4]) == (min(values), max(values))
    assert client.get(f"{RUN}/distribution?tag=level").status_code == 400


def test_recorded_and_computed_distributions_are_equal(client, monkeypatch):
    parameters = {"metric": "reward", "environment": "wordle", "histogram": "true"}
    recorded = client.get(f"{RUN}/distribution", params=parameters).json()
    monkeypatch.setattr(curves.Filters, "conditions", lambda filters: ([], {}))
    computed = client.get(f"{RUN}/distribution", params={**parameters, "tag": "every"}).json()
    assert recorded["histogram"][3] and recorded["histogram"] == computed.pop("histogram")
    assert all(recorded[name] == pytest.approx(values) for name, values in computed.items())


def test_an_unknown_distribution_is_refused(client):
    assert "has no distribution" in client.get(f"{RUN}/distribution?metric=x").json()["detail"]


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("samples?reward=many", 400),
        ("samples?reward=1 to many", 400),
        ("samples?tag=level", 400),
        ("samples?range=reward", 400),
        ("samples?" + "&".join(["range=reward%3D0..1"] * 121), 400),
        ("samples?reward=" + ",".join(["0"] * 1001), 400),
        ("samples?range=reward%3D..", 400),
        ("samples?range=reward%3D0..inf", 400),
        ("samples.jsonl?sort=prompt_text", 400),
        ("samples.jsonl?limit=0", 422),
        ("distribution?metric=", 400),
        (f"samples?step_min={2**63}", 422),
        (f"samples?offset={2**63}", 422),
        (f"groups?step={2**63}", 422),
        (f"logs?since={2**63}", 422),
        (f"samples/{2**63}/0-0", 422),
        (f"evals/{2**63}/e/samples", 422),
    ],
)
def test_a_parameter_that_cannot_be_used_is_refused(client, address, status):
    assert client.get(f"{RUN}/{address}").status_code == status


def test_evals_lead_to_their_answers_by_item(client):
    (row,) = client.get(f"{RUN}/evals").json()
    assert (row["name"], row["accuracy"], row["step"]) == ("math", 0.5, -1)
    (answer,) = client.get(f"{RUN}/evals/1/e/samples").json()
    assert (answer["item"], answer["sample_id"]) == (3, "0-0")
    assert answer["score"] == sample_rows(0)[0]["reward"]
    assert client.get(f"{RUN}/evals/1/none/samples").status_code == 404


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


def test_gauges_have_smallest_mean_and_largest_reading_of_each_part(client):
    assert client.get("/api/runs/below~second/gauges/names").json() == [
        {"name": "queue_depth", "component": "orchestrator", "series": 1}
    ]
    (series,) = client.get("/api/runs/below~second/gauges?names=queue_depth&points=2").json()
    assert (series["min"], series["mean"], series["max"]) == ([0, 6], [2.5, 8.5], [5, 11])
    assert series["time"] == [T0 + 50, T0 + 110]


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


def test_a_search_finds_what_the_environment_and_tools_said(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        texts = {
            "turns": {"turn": 1, "role": "environment", "text": "Wrong, the needle is lower."},
            "tool_calls": {"turn": 0, "call": 0, "name": "grep", "result": "needle.txt: 3"},
            "info": {"number": 0, "turn": 0, "key": "guess", "value": "needle"},
        }
        for table, row in texts.items():
            recorder.write("samples", {**sample_rows(0)[0], "sample_id": table})
            recorder.write(table, {"sample_id": table, **row})
        recorder.write("samples", {**sample_rows(0)[0], "sample_id": "other"})
        recorder.flush()
        client = TestClient(create_app([tmp_path]), base_url="http://localhost")

        def found() -> set[str]:
            body = client.get("/api/runs/run/samples?search=NEEDLE").json()
            return {row["sample_id"] for row in body["rows"]}

        assert found() == set(texts)
        recorder.write("info", {"sample_id": "other", "number": 0, "turn": 0, "key": "guess", "value": "A needle"})
        recorder.flush()
        assert found() == {*texts, "other"}


def test_a_log_filter_chooses_one_process_or_all_of_a_kind(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    with Recorder(run_dir) as recorder:
        files = LogFiles(run_dir, recorder.write)
        for name in ("trainer-1", "trainer-10", "inference-0", "environment-0", "environment-server"):
            (run_dir / "logs" / f"{name}.log").write_text(f"of {name}\n")
        files.poll(T0, last=True)
    client = TestClient(create_app([tmp_path]), base_url="http://localhost")

    def lines(component: str) -> list[str]:
        return [row["message"] for row in client.get(f"/api/runs/run/logs?component={component}").json()["rows"]]

    assert lines("trainer-1") == ["of trainer-1"]
    assert lines("trainer") == ["of trainer-1", "of trainer-10"]
    assert lines("environment") == ["of environment-0", "of environment-server"]
    assert client.get("/api/runs/run/logs").json()["components"] == [
        *("environment", "environment-0", "environment-server", "inference-0", "trainer", "trainer-1", "trainer-10"),
    ]


def test_an_answer_of_an_eval_whose_sample_is_not_recorded_is_left_out(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for item in (0, 1):
            recorder.write("eval_samples", {"eval_id": "e", "sample_id": f"e-{item}", "item": item, "completion": 0})
        recorder.write("samples", {"sample_id": "e-1", "group_id": -1, "status": "eval", "step": 3, "reward": 1.0})
        recorder.write("evals", {"eval_id": "e", "name": "e", "status": "finished", "step": 3, "metric": "reward"})
    client = TestClient(create_app([tmp_path]), base_url="http://localhost")
    found = client.get("/api/runs/run/evals/1/e/samples").json()
    assert [(row["item"], row["score"]) for row in found] == [(1, 1.0)]


def test_logs_are_in_the_order_of_time_whenever_they_were_recorded(tmp_path):
    times = [3, 1, None, 2, 2, 9, 4, 8]
    with Recorder(tmp_path / "run") as recorder:
        client = TestClient(create_app([tmp_path]), base_url="http://localhost")

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


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e308, -1.7e308])
def test_samples_with_any_reward_and_without_a_group_are_listed(tmp_path, odd):
    with Recorder(tmp_path / "run") as recorder:
        for place, reward in enumerate([odd, 1.7e308 if odd < -1e300 else 0.5, *(float(one) for one in range(15))]):
            row = {**sample_rows(0)[0], "sample_id": str(place), "reward": reward}
            recorder.write("samples", {**row, "group_id": None if place % 2 else 7})
    found = TestClient(create_app([tmp_path]), base_url="http://localhost").get("/api/runs/run/samples").json()
    assert found["total"] == 17 and all(row["completion"] for row in found["rows"])
    counts = [one["count"] for one in found["facets"]["reward"]]
    assert sum(counts) >= 17 - (not math.isfinite(odd)), "a value on an edge is in two ranges"


PROMPTS = {
    "of a model": f"<|im_start|>system\n{'Be kind. ' * 60}<|im_end|>\n<|im_start|>user\nMake é 7<|im_end|>\n",
    "with examples": f"<|user|>\nMake 5<|assistant|>\n{'x' * 400}<|user|>\nMake é 7<|assistant|>\n",
    "without a template": "Make é 7",
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_list_shows_the_last_message_of_the_user_and_not_the_system_prompt(tmp_path, prompt):
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("samples", {**sample_rows(0)[0], "prompt_text": prompt})
    (row,) = TestClient(create_app([tmp_path]), base_url="http://localhost").get("/api/runs/run/samples").json()["rows"]
    assert "Make é 7" in row["prompt"][:30]


def test_ranges_of_the_smallest_numbers_are_finite():
    assert _edges(0.0, 13 * 5e-324)[0] == 0.0
