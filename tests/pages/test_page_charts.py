"""Charts: the selected step, groups of runs, evals, own sections, zoom, and what they save."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tests.pages.conftest import NUM_STEPS
from tests.pages.page_text import numbers
from tests.pages.page_visit import DashboardThread, Visit, visit

from telescope.record.reader import Run
from telescope.testing.replay import Replay


def saved(page: Page, chart: Locator) -> list[dict[str, str]]:
    """The rows of a chart's CSV."""
    chart.hover()
    with page.expect_download() as begun:
        chart.get_by_title(re.compile("^More for")).click()
        page.get_by_role("menuitem", name="Save as CSV").click()
    return list(csv.DictReader(begun.value.path().read_text().splitlines()))


def figure(page: Page, name: str) -> Locator:
    return page.locator("figure", has=page.get_by_text(name, exact=True)).first


def test_a_selected_step_is_marked_read_and_moved(visitor: Visit, runs: Path):
    page = visitor.open("first/metrics", {"step": 4, "metric": "entropy"})
    chart = figure(page, "entropy")
    expect(chart.locator(".selected")).to_be_visible()
    recorded = Run(runs / "first").sql("select metrics['entropy'] as value from steps order by step").to_dicts()
    assert numbers(chart.locator(".v").inner_text())[-1] == pytest.approx(recorded[4]["value"], abs=1e-3)
    page.keyboard.press("]")
    page.wait_for_url("**step=5*")
    assert numbers(chart.locator(".v").inner_text())[-1] == pytest.approx(recorded[5]["value"], abs=1e-3)


def test_a_chart_is_read_and_zoomed_by_keys(visitor: Visit):
    page = visitor.open("first/overview")
    figure(page, "Entropy").locator(".p").focus()
    for key in ("End", "Shift+ArrowLeft", "Shift+ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(f"**range={NUM_STEPS - 3}-{NUM_STEPS - 1}*")


def test_a_click_on_a_chart_and_a_key_lead_to_what_changed_there(visitor: Visit):
    page = visitor.open("first/overview")
    plot = figure(page, "Entropy").locator(".p")
    plot.click()
    found = figure(page, "Entropy").get_by_role("button", name=re.compile("What changed at step"))
    step = re.findall(r"step (\d+)", found.inner_text())[0]
    found.click()
    page.wait_for_url(f"**/first/changes?*step={step}*metric=entropy*")
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"at step {step}.")
    expect(page.locator("figure .cross .tag")).to_have_text(step)
    page = visitor.open("first/metrics", {"metric": "reward/total/mean"})
    page.locator("figure .p").first.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "w"):
        page.keyboard.press(key)
    page.wait_for_url("**/first/changes?*step=2*metric=reward*")
    expect(page.get_by_role("heading", name="Environments and tags")).to_be_visible()
    page.get_by_role("complementary").get_by_role("link", name=re.compile("mean before")).first.click()
    expect(page.get_by_label("Steps and groups")).to_be_visible()


def test_marks_of_the_ruler_lead_to_what_they_mark(visitor: Visit):
    page = visitor.open("first/overview")
    page.locator(".ruler a[tabindex='0']").focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    label = f"checkpoint after {NUM_STEPS} steps, not in the run directory any more"
    expect(page.locator(".ruler a:focus")).to_have_attribute("aria-label", label)
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".ruler a:focus")).to_have_attribute("aria-label", f"eval after {NUM_STEPS} steps")
    page.keyboard.press("Enter")
    page.wait_for_url("**/first/evals*after=*")


def test_enter_on_the_curve_of_accuracies_selects_that_checkpoint(visitor: Visit, runs: Path):
    query = "select min(version) as version from evals where name = 'countdown'"
    (earliest,) = Run(runs / "first").sql(query).to_dicts()
    page = visitor.open("first/evals", {"eval": "countdown"})
    curve = figure(page, "Accuracy")
    mark = curve.locator(".selected")
    expect(mark).to_have_count(1)
    latest = mark.evaluate("(mark) => mark.offsetLeft")
    curve.locator(".p").focus()
    for key in ("Home", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(f"**/first/evals*after={earliest['version']}*")
    assert mark.evaluate("(mark) => mark.offsetLeft") < latest


def test_evals_are_metrics(visitor: Visit, runs: Path):
    page = visitor.open("first/metrics", {"metric": "eval/countdown/accuracy", "with": "second"})
    rows = saved(page, figure(page, "accuracy"))
    recorded = Run(runs / "first").sql("select version, accuracy from evals where name = 'countdown' order by version")
    shown = [(int(row["step"]), float(row["first"])) for row in rows]
    assert shown == [(row["version"], pytest.approx(row["accuracy"])) for row in recorded.to_dicts()]


def test_a_group_of_runs_is_its_mean(visitor: Visit, runs: Path):
    page = visitor.open("first/metrics", {"with": "second", "group": "config.model", "metric": "entropy"})
    expect(page.locator(".runtable tbody tr")).to_have_count(1)
    rows = saved(page, figure(page, "entropy"))
    query = "select metrics['entropy'] as value from steps order by step"
    both = [[row["value"] for row in Run(runs / name).sql(query).to_dicts()] for name in ("first", "second")]
    (name,) = (key for key in rows[0] if key != "step" and "95 %" not in key)
    assert [float(row[name]) for row in rows] == pytest.approx([sum(pair) / 2 for pair in zip(*both, strict=True)])
    low, high = float(rows[0][f"{name} 95 % low"]), float(rows[0][f"{name} 95 % high"])
    # Student's t for one degree of freedom, times the standard error of two values.
    assert high - low == pytest.approx(2 * 12.706 * abs(both[0][0] - both[1][0]) / 2, rel=1e-3)


def test_a_run_keeps_the_color_that_was_chosen(visitor: Visit):
    page = visitor.open("first/metrics", {"with": "second"})
    swatch = page.get_by_role("button", name="Color of second")
    swatch.click()
    page.get_by_role("menuitem", name="pink").click()
    expect(swatch.locator("i")).to_have_attribute("style", re.compile("--c6"))
    visitor.settle()
    other = visitor.open("second/metrics", {"with": "first"})
    expect(other.get_by_role("button", name="Color of second").locator("i")).to_have_attribute(
        "style", re.compile("--c6")
    )


def test_sections_are_made_named_filled_and_removed(visitor: Visit):
    page = visitor.open("first/metrics")
    page.get_by_role("button", name="New section").click()
    page.keyboard.type("Mine")
    page.keyboard.press("Enter")
    mine = page.get_by_role("region", name="Mine")
    page.get_by_role("searchbox", name="Filter metrics").fill("learning_rate")
    page.locator(".tree .mm[title='learning_rate']").drag_to(mine)
    expect(mine.locator("figure")).to_have_count(1)
    expect(page.locator(".charts .target")).to_have_count(0)
    for key in ("Space", "ArrowUp", "Space"):
        mine.get_by_role("button", name="Move the section Mine: space").focus()
        page.keyboard.press(key)
    page.get_by_role("searchbox", name="Filter metrics").fill("")
    headings = page.locator(".charts h2")
    expect(headings.nth(1)).to_be_visible()
    before = headings.count()
    mine.get_by_role("button", name="Remove the section Mine").click()
    expect(headings).to_have_count(before - 1)


def test_every_chart_saves_its_values(visitor: Visit, runs: Path):
    page = visitor.open("first/overview")
    rows = saved(page, figure(page, "Step time"))
    recorded = Run(runs / "first").sql("select metrics['timing_backward_total'] as value from steps order by step")
    assert [float(row["backward"]) for row in rows] == pytest.approx([row["value"] for row in recorded.to_dicts()])


def test_bands_are_the_percentiles_of_the_samples(visitor: Visit, runs: Path):
    page = visitor.open("first/metrics", {"metric": "rollouts/tokens_completion/mean", "smooth": "0"})
    rows = saved(page, figure(page, "tokens_completion"))
    percentiles = ", ".join(f"quantile_cont(completion_tokens, {q / 100}) as p{q}" for q in (5, 25, 75, 95))
    query = f"select {percentiles} from samples where status = 'kept' group by step order by step"
    for shown, row in zip(rows, Run(runs / "first").sql(query).to_dicts(), strict=True):
        assert {name: float(shown[f"first {name}"]) for name in row} == pytest.approx(row, rel=1e-6)


def test_infra_charts_end_with_the_last_readings_and_zoom(visitor: Visit, runs: Path):
    page = visitor.open("first/infra", {"lines": "each"})
    chart = figure(page, "CPU")
    last = Run(runs / "first").sql(
        "select node, arg_max(value, time) as value from gauges where name = 'cpu_utilization_percent' group by node"
    )
    rows = saved(page, chart)
    for row in last.to_dicts():
        (column,) = (name for name in rows[0] if name in (row["node"], "host"))
        assert [float(one[column]) for one in rows if one[column]][-1] == pytest.approx(row["value"], rel=1e-6)
    plot = chart.locator(".u-over")
    plot.drag_to(plot, source_position={"x": 40, "y": 20}, target_position={"x": 240, "y": 20})
    page.wait_for_url("**t=*")
    plot.dblclick()
    page.wait_for_url(lambda address: "t=" not in address)


def test_times_are_since_the_start_of_the_run_also_if_it_is_known_last(visitor: Visit):
    held: list[Route] = []
    visitor.page.route(re.compile(r"/runs/[^/?]+(\?.*)?$"), lambda route: held.append(route))
    with visitor.page.expect_response(re.compile(r"/gauges/names")):
        visitor.page.goto(f"{visitor.address}/#/first/infra?step=6")
    # Times since 1970 would be drawn now.
    expect(visitor.page.locator("figure.chart")).to_have_count(0)
    for route in held:
        route.continue_()
    expect(figure(visitor.page, "CPU").locator(".tag")).to_have_text(re.compile(r"^\d{1,2}[:.]"))


def test_infra_keeps_its_place_while_another_time_is_read(visitor: Visit):
    page = visitor.open("first/infra")
    plot = figure(page, "CPU").locator(".u-over")
    plot.scroll_into_view_if_needed()
    place = page.evaluate("document.querySelector('.infra .main').scrollTop")
    assert place > 0
    held: list[Route] = []
    page.route(re.compile(r"/gauges\?.*start="), lambda route: held.append(route))
    with page.expect_request(re.compile(r"/gauges\?.*start=")):
        plot.drag_to(plot, source_position={"x": 40, "y": 20}, target_position={"x": 240, "y": 20})
    expect(plot).to_be_visible()
    for route in held:
        route.continue_()
    visitor.settle()
    assert page.evaluate("document.querySelector('.infra .main').scrollTop") == place


def test_the_range_of_steps_is_that_of_the_log(visitor: Visit, runs: Path):
    page = visitor.open("first/logs", {"range": "3-4"})
    (times,) = (
        Run(runs / "first")
        .sql("select min(started_at) as a, max(ended_at) as b from steps where step in (3, 4)")
        .to_dicts()
    )
    (count,) = (
        Run(runs / "first")
        .sql(f"select count(*) as n from logs where time >= {times['a']} and time < {times['b']}")
        .to_dicts()
    )
    assert numbers(page.locator(".logs .end").inner_text())[0] == count["n"]


PLACES_OF_TABLES = {
    "alerts": ("overview", "Health"),
    "step_stats": ("metrics", "Metrics"),
    "groups": ("rollouts", "Steps and groups"),
    "samples": ("rollouts", "Steps and groups"),
    "gauges": ("timeline", "Timeline"),
    "logs": ("logs", ""),
    "evals": ("evals", ""),
    "spans": ("changes", ""),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardThread]:
    """A dashboard over runs with one broken table each: cut off, or foreign bytes."""
    folder = tmp_path_factory.mktemp("broken")
    whole = tmp_path_factory.mktemp("whole") / "run"
    with Replay(whole, num_steps=3) as replay:
        replay.write_all()
    for number, table in enumerate(PLACES_OF_TABLES):
        shutil.copytree(whole, folder / table)
        for file in Run(folder / table).table_files(table):
            file.path.write_bytes(file.path.read_bytes()[: file.path.stat().st_size // 2] if number % 2 else b"foreign")
    with DashboardThread(folder) as opened:
        yield opened


@pytest.mark.parametrize("table", PLACES_OF_TABLES)
def test_a_broken_table_hides_no_other_and_is_named(browser: Browser, broken: DashboardThread, table: str):
    name, region = PLACES_OF_TABLES[table]
    with visit(browser, broken.address) as opened:
        page = opened.open(f"{table}/{name}")
        expect(page.get_by_role("status").filter(has_text="cannot be read")).to_contain_text(f"tables/{table}/")
        expect(page.get_by_label("Progress").first).to_contain_text("3 of 3 steps")
        if region:
            expect(page.get_by_label(region).first).to_be_visible()
        else:
            expect(page.locator("main")).to_contain_text(re.compile("cannot be read|at step"))
        assert opened.problems == []


def test_the_menu_of_a_chart_hides_no_number(visitor: Visit):
    page = visitor.open("first/metrics", {"smooth": "0.6"})
    charts = page.locator("figure.chart:has(.v)")
    expect(charts.first.locator(".v")).to_be_visible()
    for place in range(min(4, charts.count())):
        chart = charts.nth(place)
        chart.locator(".p").hover(position={"x": 60, "y": 30})
        number, menu = (chart.locator(selector).bounding_box() for selector in (".t .v", ".t .over"))
        assert number and menu and number["x"] + number["width"] <= menu["x"] + 1


@pytest.mark.parametrize("width", [1100, 1440])
def test_titles_of_infra_are_whole(visitor: Visit, width: int):
    visitor.page.set_viewport_size({"width": width, "height": 900})
    names = visitor.open("first/infra").locator(".ig .chart .t .name")
    expect(names.filter(has_text="Memory of trainer ranks")).to_be_visible()
    cut = "(names) => names.filter((name) => name.scrollWidth > name.clientWidth).map((name) => name.textContent)"
    assert names.evaluate_all(cut) == []


def test_a_chart_that_goes_under_the_pointer_leaves_no_crosshair(visitor: Visit):
    page = visitor.open("first/overview")
    plot = figure(page, "Reward").locator(".u-over")
    plot.hover(position={"x": 60, "y": 30})
    expect(figure(page, "Reward").locator(".tag")).to_have_count(1)
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.wait_for_url("**/metrics**")
    visitor.settle()
    expect(page.locator("figure.chart").first.locator(".v")).to_contain_text("last")


def test_a_tap_on_a_chart_selects_the_step_there(browser: Browser, dashboard: DashboardThread):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with visit(browser, dashboard.address, **phone) as opened:
        page = opened.open("first/overview")
        chart = figure(page, "Entropy").locator(".p")
        chart.scroll_into_view_if_needed()
        opened.settle()
        box = chart.bounding_box()
        assert box is not None
        page.touchscreen.tap(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
        page.wait_for_url(f"**step={NUM_STEPS - 1}*")
        expect(chart.get_by_role("button", name=f"What changed at step {NUM_STEPS - 1}")).to_be_visible()
        assert opened.problems == []


def test_what_a_mouse_shows_is_visible_on_a_tablet(browser: Browser, dashboard: DashboardThread):
    tablet = {"viewport": {"width": 1024, "height": 768}, "has_touch": True, "is_mobile": True}
    with visit(browser, dashboard.address, **tablet) as opened:
        page = opened.open("first/metrics")
        for hidden in (".tree .mm input:not(:checked)", ".charts .take"):
            expect(page.locator(hidden).first).to_have_css("opacity", "1")
        assert opened.problems == []
