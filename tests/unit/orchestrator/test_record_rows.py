"""Record rows fit the columns of their tables and survive a round trip."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.unit.orchestrator.fakes import agent_sample, group, prompt, sample

from telescope.environments.types import EnvironmentInfo
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval
from telescope.evals.statistics import Estimate
from telescope.orchestrator import record_rows
from telescope.orchestrator.run_state import RunState
from telescope.record.convert import Batch
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.tables import COLUMN_NAMES, TABLES
from telescope.rollout import sample_rows
from telescope.rollout.exchange import RunningSample
from telescope.rollout.sample import SamplingSettings
from telescope.trainer.batch import SampleTokens


def an_eval() -> tuple[PlannedEval, EvalResult]:
    sampling = SamplingSettings(temperature=0.7, top_p=0.9, max_tokens=64, max_context=128)
    plan = PlannedEval("math500", "eval/math500#0", [EvalItem(7, prompt("uid 7"))], sampling, held_out=True)
    interval = Estimate(0.5, 0.25, 0.75, 1)
    metrics = {"correct": 0.5, "pass@1/correct": 0.5}
    return plan, EvalResult("math500", 10, 1, 1, 0.7, metrics, 1.5, True, estimate=interval, gain=interval)


def some_tokens(sample_id: str) -> SampleTokens:
    numbers = np.array([0.0, -0.5, -0.25], dtype=np.float32)
    trained = np.array([False, True, True])
    return SampleTokens(sample_id, np.array([4, 5, 6]), trained, numbers, np.array([-1, 2, 2]), numbers, numbers)


def rows_of_everything() -> dict[str, list[dict[str, Any]]]:
    kept, masked = sample(0, 0.5, lengths=(3, 2), version=4, correct=1.0), sample(1, None, lengths=())
    kept.reward.info_turns[:] = [{"guess": "crane", "colors": ["grey", "green"]}, {"turn": 4, "correct": 1.0}]
    call = {"name": "add", "arguments": '{"a": 1}', "result": "3", "error": None, "sandbox": "s1", "seconds": 0.25}
    kept.turns[1].tool_calls = [call, {**call, "result": "Error: no", "error": "no"}]
    made = group([0.5, None])
    made.samples = [kept, masked]
    common: dict[str, Any] = {"status": "kept", "reason": None, "step": 7}
    info = EnvironmentInfo("arithmetic", 64, metrics_ranges={"correct": {"min": 0.0, "max": 1.0}})
    plan, result = an_eval()
    of_eval = record_rows.rows_of_eval_sample(plan, 10, plan.items[0], sample(2, 1.0), "p")
    return {
        "environments": [
            record_rows.environment_row("arithmetic", "arithmetic", 0.5, info),
            record_rows.environment_row("eval/arithmetic#0", "arithmetic", None, info),
        ],
        "groups": [record_rows.group_row(made, **common)],
        "samples": [
            record_rows.sample_row(kept, "6 x 7?", advantage=1.5, age=2, **common),
            record_rows.sample_row(masked, "6 x 7?", **common),
            *(row for table, row in of_eval if table == "samples"),
        ],
        "prompts": [record_rows.prompt_row("arithmetic", plan.items[0].prompt)],
        "evals": [record_rows.eval_row(plan, 10, 5.0, result, servers={1, 0})],
        "eval_samples": [row for table, row in of_eval if table == "eval_samples"],
        "turns": [row for one in made.samples for row in sample_rows.turn_rows(one)],
        "tool_calls": [row for one in made.samples for row in sample_rows.tool_call_rows(one)],
        "info": [row for one in made.samples for row in sample_rows.info_rows(one)],
        "tokens": [record_rows.tokens_row(some_tokens("5-0/1"), 7)],
        "spans": [row for one in made.samples for row in sample_rows.sample_span_rows(one)],
    }


def test_a_note_in_the_published_form_is_one_row() -> None:
    made = sample(1, 1.0)
    note = {"turn_order": 0, "info_key": "stderr", "info_value": "boom", "info_type": "error"}
    made.reward.info_turns[:] = [{"turn": 3, "guess": "a"}, note, {**note, "info_value": {"code": 1}, "turn_order": 2}]
    rows = [[row.get(key) for key in ("turn", "key", "value", "type")] for row in sample_rows.info_rows(made)]
    assert rows == [[3, "guess", "a", None], [0, "stderr", "boom", "error"], [2, "stderr", '{"code": 1}', "error"]]


def test_a_reply_keeps_what_the_environment_calls_it() -> None:
    made = sample(1, 1.0)
    made.turns[0].replies = [("user", "3", "tool_result"), ("user", "4", ""), ("user", "5")]
    assert [row.get("turn_type") for row in sample_rows.turn_rows(made)[:3]] == ["tool_result", None, None]


@pytest.mark.parametrize("table", sorted({*rows_of_everything()} - {"spans"}))
def test_a_row_fills_every_column_but_the_recorder_s_own(table: str) -> None:
    for row in rows_of_everything()[table]:
        earlier = {"info_turns", "prompt_text", "completion_text"}
        assert set(TABLES[table].column_names) - set(row) - earlier == {"attempt"}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = rows_of_everything()
    with Recorder(tmp_path) as recorder:
        for table, table_rows in written.items():
            for row in table_rows:
                recorder.write(table, row)
    run = Run(tmp_path)
    for table, table_rows in written.items():
        read = run.table(table).to_pylist()
        assert len(read) == len(table_rows)
        for expected, actual in zip(table_rows, read, strict=True):
            for name, value in expected.items():
                # Maps come back as pairs, arrays as lists.
                plain = list(value.items()) if isinstance(value, dict) else value
                plain = plain.tolist() if hasattr(plain, "tolist") else plain
                assert actual[name] == plain, (table, name)


def test_rows_have_their_turn_and_their_place_in_the_sample() -> None:
    rows = rows_of_everything()
    assert [(row["turn"], row["call"], row["error"]) for row in rows["tool_calls"]] == [(1, 0, None), (1, 1, "no")]
    assert [(row["number"], row["turn"], row["key"], row["value"]) for row in rows["info"]] == [
        (0, 0, "guess", "crane"), (0, 0, "colors", '["grey", "green"]'), (1, 4, "correct", "1.0"),
    ]  # fmt: skip
    tokens = [record_rows.tokens_row(some_tokens(name), 7) for name in ("5-0", "5-0/2")]
    assert [(row["sample_id"], row["part"]) for row in tokens] == [("5-0", 0), ("5-0", 2)]


def test_a_sample_that_is_not_trained_has_tokens_without_the_trainer_s_numbers() -> None:
    masked = sample(1, None, lengths=(3, 2), version=4)
    (row,) = record_rows.untrained_tokens_rows(masked, 7)
    sampled = row["versions"] >= 0
    assert (row["sample_id"], row["step"], sampled.sum(), set(row["versions"][sampled])) == (
        masked.sample_id, 7, 5, {4},
    )  # fmt: skip
    assert not row["trained"].any() and np.isnan(row["trainer_logprobs"]).all() and np.isnan(row["entropies"]).all()
    assert record_rows.untrained_tokens_rows(sample(1, None, lengths=()), 7) == []


def test_a_masked_sample_stays_masked_in_any_group_and_open_gold_answers_are_empty_text() -> None:
    row = record_rows.sample_row(sample(1, None), "6 x 7?", status="discarded", reason="zero_advantage", step=3)
    assert (row["status"], row["reason"], row["reward"]) == ("masked", "environment", None)
    assert row["failure_message"] == "KeyError: 'numbers'"
    kept = record_rows.sample_row(sample(), "6 x 7?", status="kept", reason=None, step=3)
    assert kept["golden"] == {"answer": "42", "other": ""}


def test_an_eval_is_one_row_and_its_completions_lead_to_samples_and_turns() -> None:
    plan, result = an_eval()
    row = record_rows.eval_row(plan, 10, 5.0, result, servers={1, 0})
    assert (row["eval_id"], row["step"], row["version"], row["servers"]) == ("eval0-math500-v10", 9, 10, [0, 1])
    assert (row["accuracy"], row["gain_low"], row["metrics"]["pass@1/correct"]) == (0.5, 0.25, 0.5)
    failed = record_rows.eval_row(plan, 10, 5.0, status="failed", error="its servers are gone")
    assert "accuracy" not in failed and failed["error"] == "its servers are gone"
    made = sample(2, 1.0, lengths=(3, 2))
    sample_rows.assign_rows([made], sample_rows.encode_rows([made], set()))
    tables = record_rows.rows_of_eval_sample(plan, 10, plan.items[0], made, "p")
    assert [table for table, _ in tables] == ["turns", "spans", "samples", "eval_samples"]
    encoded = [row.rows.to_pylist() for _, row in tables if isinstance(row, Batch)]
    assert list(map(len, encoded)) == [2, 4]
    assert {row["sample_id"] for rows in encoded for row in rows} == {made.sample_id}
    assert tables[-1][1]["sample_uid"] == "uid 7" and tables[-1][1]["item"] == 7
    assert tables[-2][1]["step"] == tables[-1][1]["step"] == 9, "hidden with the step that made the weights"


def test_a_group_counts_the_samples_that_were_scored() -> None:
    row = record_rows.group_row(group([0.0, None, 1.0]), status="kept", reason=None, step=3)
    assert (row["num_samples"], row["reward_mean"]) == (2, 0.5)
    assert row["reward_std"] == pytest.approx(0.5**0.5)
    masked = record_rows.group_row(group([None, None]), status="discarded", reason="all_masked", step=3)
    assert (masked["num_samples"], masked["reward_mean"], masked["reward_std"]) == (0, None, None)
    assert record_rows.group_row(group([1.0]), status="kept", reason=None, step=3)["reward_std"] is None


def test_samples_in_flight_are_those_that_are_not_done_and_name_their_slot() -> None:
    started, done, running = group([1.0, None, 0.0], n=6), group([1.0, 0.0], n=7), group([1.0, 0.0], n=8)
    for each in (started, running):
        del each.samples[1]
    running.running = cast(Any, SimpleNamespace(samples={1: RunningSample(2, 5, 10.0)}))
    in_flight = [row for each in (started, done, running) for row in record_rows.in_flight_rows(each)]
    assert [row["sample_id"] for row in in_flight] == ["6-1", "8-1"]
    assert set(in_flight[0]) <= COLUMN_NAMES["samples"]
    assert in_flight[0]["prompt_tokens"] == 3 and "server" not in in_flight[0]
    assert (in_flight[1]["server"], in_flight[1]["lane"], in_flight[1]["started_at"]) == (2, 5, 10.0)


def call(name: str, seconds: float | None) -> dict[str, Any]:
    return {"name": name, "arguments": "", "result": "", "error": None, "seconds": seconds}


def test_spans_of_a_sample_are_its_turns_replies_and_reward() -> None:
    made = sample(0, 1.0, lengths=(3, 2))
    made.turns[0].slot = 2
    spans = sample_rows.sample_span_rows(made)
    assert [(span["name"], span["start"], span["end"], span["attributes"]["turn"]) for span in spans] == [
        ("generate", 10.0, 10.5, "0"), ("environment", 10.5, 11.0, "0"),
        ("generate", 11.0, 11.5, "1"), ("reward", 11.5, 12.25, "1"),
    ]  # fmt: skip
    assert all(span["sample_id"] == "5-0" for span in spans)
    assert [span["attributes"]["lane"] for span in spans] == ["2", "2", "3", "3"], "a turn has its own slot"
    assert sample_rows.sample_span_rows(sample(1, None, lengths=())) == []


def test_an_environment_has_no_span_while_another_call_of_the_sample_runs() -> None:
    spans = sample_rows.sample_span_rows(agent_sample())
    others = [(span["name"], span["start"], span["end"]) for span in spans if span["name"] != "generate"]
    assert others == [("environment", 12.0, 12.5), ("environment", 14.0, 14.25), ("reward", 15.0, 15.5)]


def test_what_an_agent_does_before_its_first_call_is_a_span_of_the_environment() -> None:
    made = agent_sample()
    made.agent_started_at = 3.0
    (first, second, *_) = sample_rows.sample_span_rows(made)
    earliest = min(turn.started_at for turn in made.turns)
    assert (first["name"], first["start"], first["end"], first["attributes"]["turn"]) == (
        "environment", 3.0, earliest, "0")  # fmt: skip
    assert second["name"] == "generate"


def test_the_result_of_a_call_is_the_message_in_the_conversation_that_goes_on_with_it() -> None:
    (row,) = sample_rows.tool_call_rows(agent_sample())
    assert (row["turn"], row["reply"], row["result"]) == (0, 5, "4")
    turn = sample_rows.turn_rows(agent_sample())[row["reply"]]
    assert (turn["role"], turn["text"], turn["trained"]) == ("tool", "4", None)
    assert [one["trained"] for one in sample_rows.turn_rows(agent_sample()) if one["restarts"] is None] == [
        True, False, True, True, True]  # fmt: skip


def test_tool_calls_are_spans_inside_the_reply() -> None:
    made = sample(0, 1.0, lengths=(3, 2))
    made.turns[0].tool_calls = [call("add", 0.125), call("unread", None), call("search", 0.25)]
    made.turns[1].tool_calls = [call("fetch", 0.5), call("fetch", 0.75)]
    tools = [span for span in sample_rows.sample_span_rows(made) if span["name"] == "tool"]
    assert [(span["attributes"]["tool"], span["start"], span["end"]) for span in tools] == [
        ("add", 10.5, 10.625), ("search", 10.625, 10.875),
        ("fetch", 11.5, 12.0), ("fetch", 11.5, 12.25),
    ], "calls that took longer in total than the reply ran together"  # fmt: skip


def test_samples_of_a_report_have_their_own_rows_also_after_a_checkpoint(tmp_path: Path) -> None:
    made = group([1.0, None, 0.0])
    made.samples[1].turns.clear()
    texts = [[turn.text for turn in one.turns] for one in made.samples]
    sample_rows.assign_rows(made.samples, sample_rows.encode_rows(made.samples, set()))
    assert not any(turn.text for one in made.samples for turn in one.turns), "a text is sent once"
    state = RunState.load_state_dict(json.loads(json.dumps(RunState(groups=[made]).state_dict())))
    with Recorder(tmp_path, attempt=2) as recorder:
        recorder.write("turns", {"sample_id": "earlier"})
        recorder.write("prompts", {"prompt_key": "p"})
        recorder.flush()
        recorder.attempt = 3
        recorder.write("prompts", {"prompt_key": "p"})
        for one in state.groups[0].samples:
            for table, rows in one.rows.items():
                recorder.write(table, rows)
    assert Run(tmp_path).table("prompts", all_attempts=True)["attempt"].to_pylist() == [2, 3]
    read = Run(tmp_path).table("turns").to_pylist()[1:]
    assert [row["text"] for row in read] == [text for each in texts for text in each]
    assert {(row["attempt"], row["sample_id"]) for row in read} == {(3, "5-0"), (3, "5-2")}
