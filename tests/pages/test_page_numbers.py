"""Numbers on the pages against the same numbers computed from the Parquet files of the record."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.pages.page_text import number, numbers, plain, shows, table
from tests.pages.page_visit import Visit

from telescope.record.reader import Run, list_runs

WORDS = "answer>1"
"""What prompts or answers of the recorded run say."""

SOME_METRICS = 24
"""A step has 150 metrics; one of so many is compared."""

LAST_STEPS = 10
"""Steps over which a health cell takes the mean."""


@pytest.fixture(scope="module")
def record(runs: Path) -> Run:
    """The record of the run `first`."""
    return Run(runs / "first")


def rows(record: Run, query: str) -> list[dict[str, Any]]:
    """Rows of a query straight on the files."""
    return record.sql(query).to_dicts()


def values_of(record: Run, metric: str) -> list[float | None]:
    """Values of a metric, a step each, without those that are not finite."""
    found = rows(record, f"select metrics['{metric}'] as value from steps order by step")
    return [None if row["value"] is None or row["value"] != row["value"] else row["value"] for row in found]


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def of_list(page: Page, name: str) -> Locator:
    """The value behind a name in a list of names and values."""
    return page.locator("dl.kv > div").filter(has=page.get_by_text(name, exact=True)).locator("dd").first


def download(page: Page, click: Locator) -> str:
    with page.expect_download() as begun:
        click.click()
    return begun.value.path().read_text()


def test_runs_show_their_steps_and_rewards(visitor: Visit, runs: Path):
    shown = table(visitor.open("").get_by_role("table"))
    summaries = list_runs(runs)
    assert len(shown) == len(summaries)
    for summary, row in zip(summaries, shown, strict=True):
        assert row["run"].split()[0] == summary.name
        assert numbers(row["steps"]) == [summary.steps, summary.num_steps]
        first, last = numbers(row["reward"])
        assert (first, last) == pytest.approx((summary.reward_first, summary.reward_last), abs=0.006)


def test_overview_shows_progress_and_health(visitor: Visit, record: Run):
    page = visitor.open("first/overview")
    summary = record.summary()
    assert numbers(page.get_by_label("Progress").first.inner_text())[:2] == [summary.steps, summary.num_steps]
    expect(page.get_by_label("Health")).to_contain_text(f"Mean of the last {LAST_STEPS} steps")
    cells = page.get_by_label("Health").get_by_role("button").all()
    compared = 0
    for cell in cells:
        metric = cell.get_attribute("title") or ""
        if " / " not in metric and known(values_of(record, metric)):
            mean = fmean(known(values_of(record, metric)[-LAST_STEPS:]))
            text = plain(cell.locator(".n").inner_text())
            assert shows(text, mean / 100 if "%" in text else mean), f"{metric}: {text}, not {mean}"
            compared += 1
    assert compared >= 3


def test_overview_shows_the_outcome_and_where_the_time_went(visitor: Visit, record: Run):
    page = visitor.open("first/overview", {"price": "2"})
    outcome = page.get_by_label("Outcome")
    evals = record.sql("select name, step, accuracy from evals where number = 0 order by step").to_dicts()
    expect(outcome.get_by_role("heading")).to_have_text(
        f"{100 * evals[0]['accuracy']:.1f}\u202f% → {100 * evals[-1]['accuracy']:.1f}\u202f%"
    )
    expect(outcome).to_contain_text(f"after step {evals[-1]['step'] + 1}")
    hours = page.get_by_label(re.compile("^Where the"))
    tokens = record.sql("select sum(completion_tokens) as n from samples").to_dicts()[0]["n"]
    assert numbers(hours.locator(".cost").first.inner_text())[0] == tokens
    total, money = numbers(hours.locator("h2").inner_text())[:2]
    assert money == pytest.approx(2 * total, abs=0.01)


def test_charts_of_the_overview_end_with_the_last_step(visitor: Visit, record: Run):
    page = visitor.open("first/overview")
    for title, metric in {
        "Reward": "reward/all_groups/mean",
        "Entropy": "entropy",
        "Gradient norm": "grad_norm",
    }.items():
        chart = page.locator("figure", has=page.get_by_text(title, exact=True))
        text = chart.locator(".v").inner_text()
        assert text.startswith("last") and shows(text, known(values_of(record, metric))[-1]), title


def test_metrics_show_the_last_value_of_each(visitor: Visit, record: Run):
    page = visitor.open("first/metrics")
    names = [row["name"] for row in rows(record, "select distinct unnest(map_keys(metrics)) as name from steps")]
    tree = page.get_by_role("complementary", name="Metrics")
    for name in sorted(names)[::SOME_METRICS]:
        tree.get_by_role("searchbox").fill(name)
        row = tree.locator(f'[title="{name}"]')
        assert shows(row.locator(".r").inner_text(), known(values_of(record, name))[-1]), name


def test_a_chart_saved_as_csv_has_the_values_of_the_record(visitor: Visit, record: Run):
    page = visitor.open("first/metrics", {"metric": "entropy"})
    page.get_by_role("button", name="More for entropy").first.click()
    text = download(page, page.get_by_role("menuitem", name="Save as CSV"))
    saved = list(csv.reader(text.splitlines()))[1:]
    recorded = rows(record, "select step, metrics['entropy'] as value from steps order by step")
    assert [int(step) for step, _ in saved] == [row["step"] for row in recorded]
    # The API sends nine significant digits.
    assert [float(value) for _, value in saved] == pytest.approx([row["value"] for row in recorded], rel=1e-8)


def test_rollouts_show_the_groups_of_a_step(visitor: Visit, record: Run):
    page = visitor.open("first/rollouts", {"step": 5})
    recorded = {row["group_id"]: row for row in rows(record, "select * from groups where step = 5")}
    listed = page.get_by_role("listbox", name="Groups of the step").get_by_role("option").all()
    assert len(listed) == len(recorded)
    for option in listed:
        row = recorded[int(plain(option.locator("span").first.inner_text()))]
        assert number(option.locator("span.r").inner_text()) == pytest.approx(row["reward_mean"], abs=0.006)
        assert option.locator(".sq i").count() == row["num_samples"]
        assert (option.get_attribute("title") or "").startswith(row["status"])


def test_rollouts_show_the_numbers_of_an_answer(visitor: Visit, record: Run):
    where = "status = 'kept' and environment = 'countdown' and metrics['correct'] = 1"
    (sample,) = rows(record, f"select * from samples where {where} order by step desc limit 1")
    page = visitor.open("first/rollouts", {"step": sample["step"], "sample": sample["sample_id"], "view": "text"})
    pane = page.get_by_role("complementary", name="Numbers")
    assert shows(pane.locator(".big").nth(0).inner_text(), sample["reward"])
    assert shows(pane.locator(".big").nth(1).inner_text(), sample["advantage"])
    assert shows(of_list(page, "prompt").inner_text(), sample["prompt_tokens"])
    assert shows(of_list(page, "this answer").inner_text(), sample["completion_tokens"])
    assert of_list(page, "stopped by").inner_text() == sample["stop_reason"]
    for name, value in sample["metrics"].items():
        assert shows(of_list(page, name).inner_text(), value), name
    answer = sample["completion_text"].rpartition("</think>")[2].strip()
    expect(page.get_by_label("Conversation")).to_contain_text(answer)


def test_facets_and_search_count_what_the_record_has(visitor: Visit, record: Run):
    page = visitor.open("first/rollouts", {"list": "answers"})
    facets = page.get_by_label("Search and facets")
    counted = rows(record, "select status, count(*) as n from samples group by status")
    for row in counted:
        assert numbers(facets.get_by_role("checkbox", name=row["status"]).locator("b").inner_text()) == [row["n"]]
    page.get_by_label("Search all answers and prompts").fill(WORDS)
    matches = " or ".join(f"{column} ilike '%{WORDS}%'" for column in ("prompt_text", "completion_text"))
    (found,) = rows(record, f"select count(*) as n from samples where {matches}")
    assert found["n"] > 0
    expect(facets.locator(".total > span")).to_have_text(f"{found['n']} answers")


def test_a_critical_path_adds_up_to_its_step(visitor: Visit, record: Run):
    page = visitor.open("first/timeline", {"step": 5})
    (step,) = rows(record, "select ended_at - started_at as seconds from steps where step = 5")
    parts = [number(row["s"]) for row in table(page.locator("table.cp"))]
    whole = parts.pop()
    assert whole == pytest.approx(step["seconds"], abs=0.006)
    assert sum(part for part in parts if part is not None) == pytest.approx(whole, abs=0.01 * len(parts))


def test_a_request_of_an_earlier_attempt_is_shown(visitor: Visit, runs: Path):
    (sample,) = rows(Run(runs / "resumed"), "select * from samples where sample_id = '20-0'")
    assert sample["attempt"] == 1
    page = visitor.open("resumed/timeline", {"step": sample["step"], "sample": "20-0"})
    assert shows(of_list(page, "its reward").inner_text(), sample["reward"])
    assert of_list(page, "status").inner_text() == sample["status"]


def test_an_exported_trace_has_the_spans_of_the_view(visitor: Visit, record: Run):
    page = visitor.open("first/timeline", {"t": "40-60"})
    trace = json.loads(download(page, page.get_by_role("button", name="Export to Perfetto")))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    info = record.info
    begin = info.started_at
    inside = rows(
        record,
        f'select name, start, "end" from spans where "end" >= {begin + 40} and start <= {begin + 60} order by start',
    )
    assert len(events) == len(inside)
    shown = sorted((event["ts"] / 1e6, event["dur"] / 1e6) for event in events)
    for (start, length), row in zip(shown, inside, strict=True):
        assert start == pytest.approx(row["start"] - begin - 40, abs=1e-3)
        assert length == pytest.approx(row["end"] - row["start"], abs=1e-3)


def test_evals_show_accuracy_and_the_items_that_changed(visitor: Visit, record: Run):
    page = visitor.open("first/evals", {"eval": "countdown"})
    before, *_, after = rows(record, "select * from evals where name = 'countdown' order by version")
    samples = (
        "select item, version, avg(samples.metrics['correct']) as score from eval_samples "
        "join evals using (attempt, eval_id) join samples using (attempt, sample_id) "
        "where name = 'countdown' group by item, version"
    )
    scores = {(row["item"], row["version"]): row["score"] for row in rows(record, samples)}
    for row in (before, after):
        mean = fmean(score for (_, version), score in scores.items() if version == row["version"])
        assert row["accuracy"] == pytest.approx(mean)
        (shown,) = (one for one in table(page.locator("table").first) if one["steps"] == str(row["version"]))
        assert shows(shown["accuracy"], mean)
    right = {key: score >= 0.5 for key, score in scores.items()}
    items = {item for item, _ in scores}
    for title, (was, now) in {"lost": (True, False), "gained": (False, True), "right twice": (True, True)}.items():
        expected = sum(right[item, before["version"]] is was and right[item, after["version"]] is now for item in items)
        assert page.get_by_role("listbox", name=f"{expected} {title}").get_by_role("option").count() == expected
    said = numbers(page.locator(".verdict p").inner_text())
    assert said[0] == pytest.approx(100 * after["gain"], abs=0.051)
    assert said[2:4] == pytest.approx([100 * after["gain_low"], 100 * after["gain_high"]], abs=0.051)


def test_answers_that_were_not_recorded_are_named_and_no_zeros(visitor: Visit):
    visitor.page.route("**/evals/1/eval0-countdown-v70/samples", lambda route: route.fulfill(json=[]))
    page = visitor.open("first/evals", {"eval": "countdown"})
    expect(page.locator(".verdict h1")).to_have_text(re.compile(r"^countdown went from [\d.]+\s%* to [\d.]+\s%*\.$"))
    expect(page.get_by_label("Items")).to_contain_text("after 12 steps were not recorded")
    expect(page.get_by_role("listbox")).to_have_count(0)


def test_infra_shows_the_last_reading_of_each_machine(visitor: Visit, record: Run):
    page = visitor.open("first/infra", {"machines": "table"})
    machines = {row["Machine"].split()[0]: row for row in table(page.get_by_label("Machines").locator("table"))}
    loads = rows(
        record,
        "select node, arg_max(value, time) as last, avg(value) as mean from gauges "
        "where name = 'cpu_utilization_percent' group by node",
    )
    assert loads
    for row in loads:
        shown = machines[row["node"]]
        assert shows(shown["at the end"], row["last"] / 100)
        assert shows(shown["mean"], row["mean"] / 100)


def test_logs_show_the_newest_lines_and_count_the_errors(visitor: Visit, record: Run):
    page = visitor.open("first/logs")
    (count,) = rows(record, "select count(*) as n from logs")
    assert numbers(page.locator(".logs .end").inner_text())[0] == count["n"]
    newest = rows(record, "select message from logs order by time desc limit 1")[0]["message"]
    expect(page.get_by_role("log")).to_contain_text(newest)
    page.get_by_label("Search all lines").fill(newest[:8])
    matching = rows(record, f"select message from logs where message ilike '%{newest[:8]}%'")
    expect(page.get_by_role("log").locator(".lg")).to_have_count(len(matching))
    page.get_by_label("Search all lines").fill("")
    file = rows(record, "select source, count(*) as n from logs where source is not null group by 1 order by n")[0]
    page.get_by_label("File").select_option(file["source"])
    expect(page.locator(".logs .end")).to_contain_text(f"{file['n']} line")


def test_compared_runs_show_the_settings_that_differ(visitor: Visit, runs: Path):
    page = visitor.open("first/compare", {"with": "second"})
    configs = []
    for name in ("first", "second"):
        row = rows(Run(runs / name), "select config_json from runs")[0]
        configs.append(json.loads(row["config_json"])["values"])
    differing = {key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)}
    shown = page.get_by_role("table").locator("tbody tr td:first-child .m").all_inner_texts()
    assert set(shown) == differing
    for key in differing:
        cells = page.get_by_role("row", name=key).locator("td").all_inner_texts()
        for cell, value in zip(cells[1:], (config.get(key) for config in configs), strict=True):
            assert shows(cell, value) if isinstance(value, float) else plain(cell).lower() == str(value).lower()


def test_a_tool_call_is_one_block_with_its_result(visitor: Visit, record: Run):
    calls = rows(record, "select * from tool_calls where error is null or error = '' order by sample_id limit 1")
    (sample,) = rows(record, f"select * from samples where sample_id = '{calls[0]['sample_id']}' limit 1")
    mine = rows(record, f"select * from tool_calls where sample_id = '{sample['sample_id']}' order by call")
    notes = rows(record, f"select * from info where sample_id = '{sample['sample_id']}'")
    params = {"list": "answers", "attempt": 1, "sample": sample["sample_id"], "step": max(0, sample["step"])}
    said = visitor.open("first/rollouts", params).get_by_label("Conversation").locator(".msg")
    blocks = said.filter(has_text=re.compile("^tool call"))
    expect(blocks).to_have_count(len(mine))
    for call, block in zip(mine, blocks.all(), strict=True):
        expect(block).to_contain_text(call["error"] or call["result"])
    expect(said.filter(has_text=re.compile("^tool(?! call)"))).to_have_count(0)
    assert notes
    expect(said.locator(".notes dd")).to_have_count(len(notes))
