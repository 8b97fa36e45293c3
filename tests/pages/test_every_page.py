"""What holds for every page: no error, accessible in both themes, no sideways scroll on a phone."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.pages.page_visit import PLACES, DashboardThread, Visit, visit
from tests.unit.dashboard.conftest import T0, write_run

from telescope.cli.ui import export
from telescope.record.recorder import Recorder

AXE = Path(__file__).parents[2] / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1440, "height": 900}


def findings(page: Page) -> list[str]:
    """Serious and critical findings of axe."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())  # not add_script_tag, which the content security policy forbids
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{one['impact']} {one['id']}: {one['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"][:3]
    ]


OPENED = {
    "palette": ("first/overview", "Control+k"),
    "keys": ("first/overview", "?"),
    "note": ("first/overview", "n"),
    "compare": ("first/overview", "role=button[name=/^Compare/]"),
    "charts": ("first/overview", "role=button[name='Choose charts']"),
    "chart menu": ("first/metrics", "figure >> role=button[name=/^More for/] >> nth=0"),
    "layouts": ("first/metrics", "[title='Choose a layout']"),
    "range": ("first/rollouts", "role=button[name='add']"),
    "columns": ("", "role=button[name='Columns']"),
    "groups": ("", "[title='Group runs']"),
    "tags": ("?chosen=first", "role=button[name='Tags']"),
    "color": ("first/metrics?with=second", "[class=swatch] >> nth=0"),
}
"""What opens over a page: where, and the key or the control that opens it."""


@pytest.mark.parametrize("name", OPENED)
def test_what_opens_over_a_page_is_accessible(visitor: Visit, name: str):
    place, opener = OPENED[name]
    page = visitor.open(place)
    if "[" in opener:
        page.locator(opener).press("Enter")
    else:
        page.keyboard.press(opener)
    for theme in ("light", "dark"):
        page.evaluate(f"() => {{ location.hash += `${{location.hash.includes('?') ? '&' : '?'}}theme={theme}` }}")
        visitor.settle()
        assert page.evaluate("() => document.documentElement.dataset.theme") == theme
        expect(page.locator("dialog[open], [popover]:popover-open")).to_have_count(1)
        assert findings(page) == []


def test_pages_of_an_exported_file_are_accessible_and_fit_a_phone(browser: Browser, runs: Path, tmp_path: Path):
    export(runs / "first", tmp_path / "run.html")
    with visit(browser, "") as opened:
        for place in ("overview", "metrics", "answers", "evals", "gone"):
            for theme in ("light", "dark"):
                opened.page.goto(f"{(tmp_path / 'run.html').as_uri()}#/first/{place}?theme={theme}")
                opened.settle()
                assert findings(opened.page) == [], (place, theme)
        opened.page.set_viewport_size(PHONE)
        for place in ("overview", "metrics", "answers", "evals"):
            opened.page.goto(f"{(tmp_path / 'run.html').as_uri()}#/first/{place}")
            opened.settle()
            assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], place


LARGEST_SHIFT = 0.1
"""Of Core Web Vitals: a page that moves less is good."""


@pytest.mark.parametrize("name", ["evals", "infra", "logs"])
def test_a_page_stands_still_while_it_loads(visitor: Visit, name: str):
    visitor.page.add_init_script(
        "window.shift = 0; new PerformanceObserver((list) => list.getEntries().forEach((one) => "
        "{ window.shift += one.value })).observe({ type: 'layout-shift', buffered: true })"
    )
    page = visitor.open(*PLACES[name])
    assert page.evaluate("() => window.shift") < LARGEST_SHIFT


@pytest.mark.parametrize("name", PLACES)
def test_a_page_is_accessible_and_fits_a_phone(visitor: Visit, name: str):
    place, params = PLACES[name]
    page = visitor.open(place, {"theme": "light", **params})
    assert findings(page) == []
    page.evaluate("() => { location.hash = location.hash.replace('theme=light', 'theme=dark') }")
    visitor.settle()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert findings(page) == []
    page.set_viewport_size(PHONE)
    visitor.settle()
    # What is wider than the page is cut by these, not scrolled.
    frame = page.locator("html, body, #root, main, main > *")
    assert max(frame.evaluate_all("(all) => all.map((one) => one.scrollWidth)")) <= PHONE["width"]


def test_the_log_on_a_phone_scrolls_to_its_newest_line(browser: Browser, dashboard: DashboardThread):
    with visit(browser, dashboard.address, viewport=PHONE) as opened:
        page = opened.open("first/logs")
        assert page.evaluate("() => document.documentElement.scrollHeight") <= PHONE["height"]
        assert page.locator(".ll").evaluate("(box) => box.scrollHeight - box.scrollTop - box.clientHeight") < 20


def test_a_long_name_of_a_run_widens_no_page(browser: Browser, tmp_path: Path):
    name = "最適化_learning-rate=1e-6,model=Qwen3-0.6B_" + "x" * 80
    for folder in (name, "other"):
        write_run(tmp_path / folder, "grpo")
    with DashboardThread(tmp_path) as server, visit(browser, server.address, viewport=PHONE) as opened:
        beside = {"with": quote(name, safe="")}  # parts of a list are encoded once more
        for place, params in (("metrics", beside), ("code", {}), ("overview", {"config": "diff"})):
            page = opened.open(f"other/{place}", params)
            expect(page.locator("main")).to_contain_text(name[:20])
            frame = page.locator("html, body, #root, main, main > *")
            widths = frame.evaluate_all("(all) => all.map((one) => one.scrollWidth)")
            assert max(widths) <= PHONE["width"], place
        assert opened.problems == []


HEIGHTS = "() => [...document.querySelectorAll('.chart .p')].map((one) => one.offsetHeight)"

CUT_UNITS = """
() => [...document.querySelectorAll(".chart .u")]
  .filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.closest(".t").innerText)
"""


@pytest.mark.parametrize("place", ["overview", "metrics", "infra", "evals"])
def test_units_of_charts_are_whole_on_a_laptop(browser: Browser, dashboard: DashboardThread, place: str):
    with visit(browser, dashboard.address, viewport=LAPTOP) as opened:
        page = opened.open(f"first/{place}")
        assert page.evaluate(CUT_UNITS) == []
        heights = page.evaluate(HEIGHTS)
        page.locator(".chart .p").first.hover()  # all charts show their values there, which are longer
        assert opened.settle().evaluate(HEIGHTS) == heights


def test_the_list_of_all_evals_fits_its_pane(browser: Browser, tmp_path: Path):
    write_run(tmp_path / "run", "grpo")
    shown = {"name": "math", "status": "finished", "accuracy": 0.512, "accuracy_low": 0.3, "accuracy_high": 0.7}
    with Recorder(tmp_path / "run", attempt=1) as recorder:
        for version, source in ((500, "live"), (500, "standalone"), (1500, "standalone")):
            times = {"started_at": T0, "ended_at": T0 + 754.0}
            row = {"eval_id": f"{source}-{version}", "step": version - 1, "version": version, "source": source}
            recorder.write("evals", {**row, **shown, **times, "num_items": 500, "num_completions": 4})
    with DashboardThread(tmp_path) as server, visit(browser, server.address, viewport=LAPTOP) as opened:
        pane = opened.open("run/evals").locator(".evals .first")
        expect(pane.get_by_role("row", name="500 later").first).to_be_visible()
        assert pane.evaluate("(pane) => pane.scrollWidth <= pane.clientWidth")
