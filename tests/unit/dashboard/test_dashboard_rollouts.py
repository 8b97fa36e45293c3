"""Groups, samples, distributions and evals, against numbers from the rows that were written."""

import json
import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.unit.dashboard.conftest import NUM_STEPS, SAMPLES_PER_GROUP, T0, client_of, hold, sample_rows

from telescope.dashboard import curves, samples, store
from telescope.orchestrator.step_stats import distribution
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run

RUN = "/api/runs/first"
ALL = [row for step in range(NUM_STEPS) for row in sample_rows(step)]


def test_groups_of_a_step_have_their_samples_and_say_why_they_were_discarded(client):
    groups = client.get(f"{RUN}/groups?step=4").json()
    assert [group["id"] for group in groups] == [16, 17, 18, 19]
    assert [group["reason"] for group in groups] == [None, None, None, "zero_advantage"]
    assert groups[0]["prompt"] == "Make 4 of 100 % of the numbers"
    expected = [(row["sample_id"], row["reward"], row["completion_tokens"]) for row in sample_rows(4)[:4]]
    assert [(one["id"], one["reward"], one["length"]) for one in groups[0]["samples"]] == expected
    assert groups[0]["samples"][1]["completion"] == "the answer_1 of group 0 is Straße"


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
    client = client_of(tmp_path)
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


@pytest.mark.parametrize(("query", "passes"), [
    ("", lambda row: True), ("status=kept", lambda row: row["status"] == "kept"),
    ("status=kept,discarded&reward=1", lambda row: row["reward"] == 1),
    ("environment=wordle&stop_reason=length", lambda row: row["group_id"] % 2 and row["sample_index"] == 3),
    ("step_min=3&step_max=5", lambda row: 3 <= row["step"] <= 5),
    ("search=ANSWER_2", lambda row: row["sample_index"] == 2), ("search=100 %25 of", lambda row: True),
    ("search=1_0 %25", lambda row: False), ("search=strasse", lambda row: False),
    ("search=make 7 of&status=kept", lambda row: row["step"] == 7 and row["status"] == "kept"),
    ("search=' OR 1=1 --", lambda row: False), ("environment=a' OR '1'='1", lambda row: False),
    ("tag=level%3D1&tag=level%3D2", lambda row: row["tags"]["level"] in "12"),
    ("tag=level%3D1&tag=none%3Dx", lambda row: False), ("tag=a' OR '1'='1%3Dx", lambda row: False),
    ("range=completion_tokens%3D20..30", lambda row: 20 <= row["completion_tokens"] <= 30),
    ("range=correct%3D0.5..&range=step_none%3D..1", lambda row: False),
    ("range=correct%3D0.5..&tag=level%3D0", lambda row: row["reward"] > 0.5 and row["tags"]["level"] == "0"),
    ("range=advantage%3D..-0.5", lambda row: row["advantage"] is not None and row["advantage"] <= -0.5),
])  # fmt: skip
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


def test_a_hit_shows_what_is_around_it_and_orders_do_not_depend_on_the_list(client):
    page = client.get(f"{RUN}/samples?search=OF GROUP 1&limit=1000").json()
    expected = {f"the answer_{index} of group 1 is Straße" for index in range(SAMPLES_PER_GROUP)}
    assert {row["snippet"] for row in page["rows"]} == expected
    nothing = client.get(f"{RUN}/samples?search=nowhere").json()
    assert nothing["rows"] == [] and nothing["metrics"] == page["metrics"] == ["correct"]


def test_rows_and_counts_can_be_asked_for_one_by_one(client):
    both = client.get(f"{RUN}/samples?status=kept&limit=5").json()
    assert client.get(f"{RUN}/samples?status=kept&limit=5&facets=false").json() == {**both, "facets": {}}
    assert client.get(f"{RUN}/samples?status=kept&limit=0").json() == {**both, "rows": []}


def test_samples_are_sorted_and_paged(client):
    expected = sorted((row["completion_tokens"] for row in ALL), reverse=True)
    pages = [client.get(f"{RUN}/samples?sort=-completion_tokens&limit=50&offset={first}").json() for first in (0, 50)]
    assert [row["completion_tokens"] for page in pages for row in page["rows"]] == expected[:100]
    by_metric = client.get(f"{RUN}/samples?sort=-metric:correct&limit=200").json()["rows"]
    assert [row["metrics"]["correct"] for row in by_metric] == sorted((row["reward"] for row in ALL), reverse=True)
    first = pages[0]["rows"][0]
    assert "prompt_text" not in first
    assert first["completion"].startswith(f"the answer_{first['sample_index']}")


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
    assert client.get(f"{RUN}/samples.jsonl?search=nowhere").text == ""


def test_samples_in_flight_are_those_of_a_live_run(tmp_path):
    row = {"group_id": 3, "environment": "wordle", "start_version": 2, "prompt_tokens": 9, "server": 1, "lane": 4}
    with Recorder(tmp_path / "run") as recorder:
        client = client_of(tmp_path)
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
    client = client_of(root)
    begun, go_on = hold(monkeypatch, store, "_matches")
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(client.get, f"{RUN}/samples?search=answer_2")
        assert begun.wait(30)
        assert client.get(f"{RUN}/samples?status=kept").json()["total"] == len(ALL) * 3 // 4
        go_on.set()
        assert search.result().json()["total"] == len(ALL) // 4


def test_a_list_over_many_steps_of_a_large_record_reads_no_texts(client, monkeypatch):
    monkeypatch.setattr(samples, "SMALL_BYTES", 0)
    monkeypatch.setattr(samples, "NEAR_STEPS", 1)
    assert client.get(f"{RUN}/samples?limit=500").json()["rows"][0]["completion"] == ""
    assert client.get(f"{RUN}/samples?step_min=3&step_max=4").json()["rows"][0]["completion"].startswith("the answer")


def test_a_sample_has_its_texts_turns_and_times(client):
    body = client.get(f"{RUN}/samples/1/5-2").json()
    row = next(row for row in ALL if row["sample_id"] == "5-2")
    for name in ("prompt_text", "golden", "metrics", "tags", "reward", "advantage", "lane"):
        assert body[name] == row[name]
    assert body["messages"] == [{"role": "user", "content": "Make 1 of 100 % of the numbers"}]
    assert [turn["text"] for turn in body["turns"]] == [row["completion_text"]]
    assert body["turns"][0]["logprobs"] == [pytest.approx(-0.1), pytest.approx(-0.2), None]
    times = {"start": row["started_at"], "end": row["generated_at"], "first_token_seconds": 0.25}
    assert body["spans"] == [{"name": "generate", **times}]
    assert client.get(f"{RUN}/samples/1/no").status_code == 404
    assert client.get(f"{RUN}/samples/1/40-0").status_code == 404, "superseded by attempt 2"


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


def test_recorded_and_computed_distributions_are_equal(client, monkeypatch):
    parameters = {"metric": "reward", "environment": "wordle", "histogram": "true"}
    recorded = client.get(f"{RUN}/distribution", params=parameters).json()
    monkeypatch.setattr(curves.Filters, "conditions", lambda filters: ([], {}))
    computed = client.get(f"{RUN}/distribution", params={**parameters, "tag": "every"}).json()
    assert recorded["histogram"][3] and recorded["histogram"] == computed.pop("histogram")
    assert all(recorded[name] == pytest.approx(values) for name, values in computed.items())


def test_an_unknown_distribution_is_refused(client):
    assert "has no distribution" in client.get(f"{RUN}/distribution?metric=x").json()["detail"]


@pytest.mark.parametrize(("address", "status"), [
    ("samples?reward=many", 400), ("samples?reward=1 to many", 400), ("samples?tag=level", 400),
    ("samples?range=reward", 400), ("samples?" + "&".join(["range=reward%3D0..1"] * 121), 400),
    ("samples?reward=" + ",".join(["0"] * 1001), 400), ("samples?range=reward%3D..", 400),
    ("samples?range=reward%3D0..inf", 400), ("samples.jsonl?sort=prompt_text", 400), ("samples.jsonl?limit=0", 422),
    ("distribution?metric=", 400), (f"samples?step_min={2**63}", 422), (f"samples?offset={2**63}", 422),
    (f"groups?step={2**63}", 422), (f"logs?since={2**63}", 422), (f"samples/{2**63}/0-0", 422),
    (f"evals/{2**63}/e/samples", 422), ("samples?sort=prompt_text", 400), ("prompts?mark=often", 400),
    ("prompts?sort=prompt_text", 400), ("distribution?tag=level", 400),
])  # fmt: skip
def test_a_parameter_that_cannot_be_used_is_refused(client, address, status):
    assert client.get(f"{RUN}/{address}").status_code == status


def test_evals_lead_to_their_answers_by_item(client):
    (row,) = client.get(f"{RUN}/evals").json()
    assert (row["name"], row["accuracy"], row["step"]) == ("math", 0.5, -1)
    (answer,) = client.get(f"{RUN}/evals/1/e/samples").json()
    assert (answer["item"], answer["sample_id"]) == (3, "0-0")
    assert answer["score"] == sample_rows(0)[0]["reward"]
    assert client.get(f"{RUN}/evals/1/none/samples").status_code == 404


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
        client = client_of(tmp_path)

        def found() -> set[str]:
            body = client.get("/api/runs/run/samples?search=NEEDLE").json()
            return {row["sample_id"] for row in body["rows"]}

        assert found() == set(texts)
        recorder.write("info", {"sample_id": "other", "number": 0, "turn": 0, "key": "guess", "value": "A needle"})
        recorder.flush()
        assert found() == {*texts, "other"}


def test_an_answer_of_an_eval_whose_sample_is_not_recorded_is_left_out(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for item in (0, 1):
            recorder.write("eval_samples", {"eval_id": "e", "sample_id": f"e-{item}", "item": item, "completion": 0})
        recorder.write("samples", {"sample_id": "e-1", "group_id": -1, "status": "eval", "step": 3, "reward": 1.0})
        recorder.write("evals", {"eval_id": "e", "name": "e", "status": "finished", "step": 3, "metric": "reward"})
    client = client_of(tmp_path)
    found = client.get("/api/runs/run/evals/1/e/samples").json()
    assert [(row["item"], row["score"]) for row in found] == [(1, 1.0)]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_samples_with_any_reward_and_without_a_group_are_listed(tmp_path, odd):
    with Recorder(tmp_path / "run") as recorder:
        for place, reward in enumerate([odd, 0.5, *(float(one) for one in range(15))]):
            row = {**sample_rows(0)[0], "sample_id": str(place), "reward": reward}
            recorder.write("samples", {**row, "group_id": None if place % 2 else 7})
            recorder.write("turns", {"sample_id": str(place), "turn": 0, "role": "assistant", "text": "answer"})
    found = client_of(tmp_path).get("/api/runs/run/samples").json()
    assert found["total"] == 17 and all(row["completion"] for row in found["rows"])
    counts = [one["count"] for one in found["facets"]["reward"]]
    assert sum(counts) >= 17 - (not math.isfinite(odd)), "a value on an edge is in two ranges"


def test_a_chosen_reward_selects_the_samples_that_its_facet_counts(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for place, reward in enumerate([0.0, 1 / 3, 2 / 3, 1 / 3, 0.3, 0.1 + 0.2, -1e-9, 123456.789]):
            recorder.write("samples", {**sample_rows(0)[0], "sample_id": str(place), "reward": reward})
    client = client_of(tmp_path)
    counts = {one["value"]: one["count"] for one in client.get("/api/runs/run/samples").json()["facets"]["reward"]}
    assert counts == {"-1e-09": 1, "0": 1, "0.3": 2, "0.333333": 2, "0.666667": 1, "123457": 1}
    found = {text: client.get(f"/api/runs/run/samples?reward={text}").json()["total"] for text in counts}
    assert found == counts
