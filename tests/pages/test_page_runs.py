"""Several runs beside each other: in charts of Metrics, and as the list, the plots and the names of Runs."""

from __future__ import annotations

import csv
import re
import struct
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.pages.conftest import NUM_STEPS
from tests.pages.page_text import numbers
from tests.pages.page_visit import DashboardThread, Visit, visit
from tests.unit.dashboard.conftest import write_run

from telescope.record.reader import Run


def test_runs_are_compared_with_a_baseline(visitor: Visit, runs: Path):
    page = visitor.open("first/metrics", {"with": "second", "baseline": "second"})
    query = "select metrics['entropy'] as value from steps order by step desc limit 1"
    first, second = (Run(runs / name).sql(query).to_dicts()[0]["value"] for name in ("first", "second"))
    table = page.locator(".runtable")
    column = [text.strip() for text in table.locator("th").all_inner_texts()].index("entropy")
    shown = numbers(table.locator("tbody tr", has_text="first").locator("td").nth(column).inner_text())
    assert shown == [pytest.approx(first, rel=1e-2), pytest.approx(first - second, rel=5e-2)]
    swatch = page.get_by_role("button", name="Color of second").locator("i")
    expect(swatch).to_have_attribute("style", re.compile("--ink3"))
    page.get_by_role("button", name=f"at common step {NUM_STEPS - 1}").click()
    expect(page.locator(".charts .v", has_text=f"step {NUM_STEPS - 1}").first).to_be_visible()
    page.get_by_role("button", name="second is the baseline").click()
    page.wait_for_url(lambda address: "baseline" not in address)
    expect(swatch).not_to_have_attribute("style", re.compile("--ink3"))


def test_a_search_leaves_the_charts_that_it_finds_and_one_fills_the_screen(visitor: Visit):
    page = visitor.open("first/metrics", {"with": "second"})
    page.get_by_role("searchbox", name="Filter metrics").fill("grad_norm")
    figures = page.locator(".charts figure")
    expect(figures.first).to_have_attribute("aria-label", re.compile("grad_norm"))
    assert all("norm" in (figure.get_attribute("aria-label") or "") for figure in figures.all())
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    large = page.locator("dialog[open] figure")
    expect(large.get_by_text("second")).to_be_visible()
    large.get_by_title(re.compile("^More for")).click()
    with page.expect_download() as begun:
        page.get_by_role("menuitem", name="Save as PNG").click()
    assert struct.unpack(">II", begun.value.path().read_bytes()[16:24]) == (1920, 1200)
    page.keyboard.press("Escape")
    expect(large).to_have_count(0)
    page.wait_for_url(lambda address: "full=" not in address)


def test_a_chart_has_its_own_axes(visitor: Visit):
    page = visitor.open("first/metrics", {"metric": "entropy"})
    chart = page.locator(".focus figure")
    chart.get_by_title(re.compile("^More for")).click()
    page.get_by_role("menuitem", name="Axes…").click()
    page.get_by_label("y from").fill("0.5")
    page.get_by_label("to", exact=True).fill("0.1")
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    page.get_by_label("to", exact=True).fill("2")
    page.get_by_label("Metric of the x axis").fill("grad_norm")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**scales=entropy*grad_norm*")
    expect(chart.get_by_text("over grad_norm")).to_be_visible()
    expect(page.get_by_role("button", name="Save", exact=True)).to_be_visible()


def test_the_user_names_and_archives_runs_without_changing_them(visitor: Visit, runs: Path):
    before = (runs / "other" / "run.json").read_bytes()
    page = visitor.open("")
    page.get_by_role("checkbox", name="Choose other").check()
    page.keyboard.press("r")
    page.get_by_label("Name", exact=True).fill("my own name")
    page.get_by_role("button", name="Rename", exact=True).last.click()
    renamed = page.get_by_role("checkbox", name="Choose my own name")
    expect(renamed).to_be_visible()
    page.get_by_role("button", name="Archive").click()
    expect(renamed).to_have_count(0)
    page.get_by_role("button", name="Show 1 archived").click()
    expect(renamed).to_be_visible()
    page.get_by_role("button", name="Unarchive").click()
    visitor.settle()
    page = visitor.open("other/overview")
    expect(page.locator("header b", has_text="my own name")).to_be_visible()
    page = visitor.open("", {"chosen": "other"})
    page.keyboard.press("r")
    page.get_by_role("button", name="Its own name").click()
    expect(page.get_by_role("checkbox", name="Choose other")).to_be_visible()
    visitor.settle()
    assert (runs / "other" / "run.json").read_bytes() == before


def test_runs_are_plotted_saved_and_searched_by_their_fields(visitor: Visit, runs: Path):
    page = visitor.open("", {"view": "scatter", "x": "config.learning_rate", "y": "reward"})
    dots = page.locator(".fieldplot svg a")
    expect(dots.first).to_be_visible()
    page.get_by_role("combobox", name="y", exact=True).select_option("steps")
    expect(page.get_by_role("link", name=re.compile(rf"first: learning_rate .*steps {NUM_STEPS}"))).to_be_visible()
    page.get_by_role("button", name="Parallel").click()
    line = page.get_by_role("link", name=re.compile("first: .*held out"))
    line.focus()
    expect(page.get_by_role("status").filter(has_text="first:")).to_be_visible()
    page.get_by_role("button", name="Table").click()
    with page.expect_download() as begun:
        page.get_by_role("button", name="CSV").click()
    saved = {row["id"]: row for row in csv.DictReader(begun.value.path().read_text().splitlines())}
    result = Run(runs / "first").result
    assert float(saved["first"]["heldout"]) == pytest.approx(result["heldout_after"])
    page.get_by_role("searchbox", name="Filter runs").fill("lerning_rate>0")
    page.get_by_role("button", name="learning_rate", exact=True).click()
    page.wait_for_url("**search=learning_rate*")
    expect(page.get_by_role("checkbox", name="Choose first")).to_be_visible()


def test_a_run_that_began_later_can_be_compared_and_its_settings_are_known(browser: Browser, tmp_path: Path):
    for name in ("one", "same"):
        write_run(tmp_path / name, "grpo")
    with DashboardThread(tmp_path) as server, visit(browser, server.address) as opened:
        page = opened.open("one/metrics")
        runs = page.context.new_page()
        runs.goto(f"{opened.address}/#/")
        expect(runs.get_by_role("row", name="one")).to_be_visible()
        write_run(tmp_path / "two", "rloo")
        expect(runs.get_by_role("row", name="two")).to_be_visible()
        page.evaluate("() => { const now = Date.now; Date.now = () => now() + 60_000; }")
        page.get_by_role("button", name="Compare").click()
        expect(page.get_by_role("dialog").get_by_role("checkbox")).to_have_count(2)
        # As a page that is seen again, which need not wait for its interval.
        runs.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        runs.get_by_role("button", name="Columns").click()
        expect(runs.get_by_role("heading", name="Settings that differ")).to_be_visible()


def test_the_list_keeps_its_place_at_a_run_when_another_begins(browser: Browser, tmp_path: Path):
    for name in ("one", "same"):
        write_run(tmp_path / name, "grpo")
    with DashboardThread(tmp_path) as server, visit(browser, server.address) as opened:
        page = opened.open("", {"view": "of an older version"})
        page.keyboard.press("j")
        first = page.locator("tr.at").inner_text().split()[0]
        write_run(tmp_path / "new", "rloo")
        expect(page.get_by_role("row", name="new")).to_be_visible()
        expect(page.locator("tr.at")).to_contain_text(first)
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/#/{first}/overview**")


def test_the_start_of_runs_is_a_date_on_an_axis(visitor: Visit):
    page = visitor.open("", {"view": "scatter", "x": "started_at"})
    plot = page.get_by_role("group", name="by started")
    expect(plot.locator("text").filter(has_text=re.compile(r"\d\d:\d\d$")).first).to_be_visible()
    expect(plot.locator("text").filter(has_text=re.compile(r"^\d{6}"))).to_have_count(0)


def test_the_last_setting_of_the_parallel_plot_can_be_taken_away(visitor: Visit):
    page = visitor.open("", {"view": "parallel", "axes": "config.learning_rate"})
    plot = page.get_by_role("group", name="Settings against")
    expect(plot.locator("text.title")).to_have_count(2)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Take config.learning_rate away").click()
    page.keyboard.press("Escape")
    expect(plot.locator("text.title")).to_have_count(1)
