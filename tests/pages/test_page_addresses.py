"""Views that are addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from tests.pages.page_visit import PLACES, DashboardThread, Visit, groups_of, profile, visit

from telescope.record.reader import Run

TALL = {"width": 1280, "height": 2400}
"""A window without a lower edge: charts are drawn when they come near it, and stay."""


def view(page: Page) -> tuple[str, str, list[str]]:
    """What a page shows: its address, its text, and the state of its controls."""
    states = page.locator("main button[aria-pressed], main input, main select, main [aria-checked]").evaluate_all(
        "(all) => all.map((one) => `${one.value ?? ''} ${one.checked ?? ''} ${one.ariaPressed} ${one.ariaChecked}`)"
    )
    # An order by a metric is offered once an answer with the metric was seen.
    offered = set(page.locator("main option").all_inner_texts())
    text = "\n".join(line for line in page.locator("main").inner_text().splitlines() if line not in offered)
    return page.url, text, states


def act(page: Page, name: str) -> None:
    """Chooses something on a page with each kind of its controls."""
    match name:
        case "runs":
            page.get_by_role("button", name="steps").click()
            page.get_by_role("searchbox", name="Filter runs").fill("first")
        case "overview":
            ruler = page.get_by_label("Progress").locator("svg")
            ruler.drag_to(ruler, source_position={"x": 200, "y": 20}, target_position={"x": 500, "y": 20})
        case "metrics":
            page.get_by_role("group", name="Axis").get_by_role("button", name="Time").click()
            page.get_by_title("Choose: spread").click()
            page.get_by_role("menuitem", name="Standard deviation").click()
            page.get_by_role("button", name="Log", exact=True).click()
            page.get_by_role("slider", name="Smooth").fill("0.9")
            page.get_by_role("searchbox", name="Filter metrics").fill("norm")
        case "rollouts":
            page.get_by_role("checkbox", name="discarded").click()
            page.get_by_label("Order").select_option("-completion_tokens")
            page.get_by_label("Search all answers and prompts").fill("answer")
            page.get_by_role("listbox").get_by_role("option").nth(2).click()
            page.get_by_role("button", name="raw").click()
        case "timeline":
            page.keyboard.press("]")
            page.keyboard.press("+")
            page.keyboard.press("ArrowRight")
        case "infra":
            page.keyboard.press("]")
        case "evals":
            page.get_by_role("button", name="calculator_agent").click()
            page.keyboard.press("j")
        case "logs":
            page.get_by_role("button", name="info", exact=True).click()
            page.get_by_label("Search all lines").fill("step 3")
        case "compare":
            page.get_by_role("button", name="Everything").click()
            page.get_by_role("searchbox", name="Filter settings").fill("m")
        case "changes":
            page.get_by_role("button", name="A step later").click()
            page.get_by_role("group", name="Steps on each side").get_by_role("button", name="1", exact=True).click()
        case "code":
            page.get_by_label("Compare with").select_option("")


@pytest.fixture(scope="module")
def elsewhere(browser: Browser) -> Iterator[BrowserContext]:
    """The profile of another person."""
    with profile(browser) as context:
        yield context


@pytest.mark.parametrize("name", PLACES)
def test_an_address_opens_the_same_view_elsewhere(visitor: Visit, elsewhere: BrowserContext, name: str):
    visitor.page.set_viewport_size(TALL)
    page = visitor.open(*PLACES[name])
    before = page.url
    act(page, name)
    visitor.settle()
    assert page.url != before
    other = Visit(elsewhere.new_page(), visitor.address)
    other.page.set_viewport_size(TALL)
    other.page.goto(page.url)
    other.settle()
    for _ in range(20):
        if view(other.page) == view(page):
            break
        other.page.wait_for_timeout(500)  # formulas and code wait for modules that no request shows
    assert view(other.page) == view(page)
    other.page.close()


def test_back_undoes_a_selection(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"step": 5})
    title = page.get_by_label("Conversation").locator(".ttl b")
    first, second = groups_of(runs, 5)[:2]
    expect(title).to_have_text(f"{first}-0")
    page.keyboard.press("j")
    expect(title).to_have_text(f"{second}-0")
    page.go_back()
    expect(title).to_have_text(f"{first}-0")


def test_links_open_the_answer_that_they_name(visitor: Visit, runs: Path):
    title = visitor.page.get_by_label("Conversation").locator(".ttl b")
    link = visitor.open("first/evals").get_by_label("Items").get_by_role("link", name="open").last
    wanted = parse_qs(link.get_attribute("href") or "")["sample"][0]
    link.click()
    expect(title).to_have_text(wanted)
    query = "select status, min(sample_id) as sample_id, min_by(step, sample_id) as step from samples group by status"
    found = Run(runs / "first").sql(query).to_dicts()
    assert {row["status"] for row in found} >= {"kept", "discarded", "eval"}
    for row in found:
        page = visitor.open("first/timeline", {"step": max(0, row["step"]), "sample": row["sample_id"]})
        page.get_by_role("link", name="Read the answer").click()
        expect(title).to_have_text(row["sample_id"])


def test_an_answer_that_is_not_there_is_not_another_one(browser: Browser, dashboard: DashboardThread):
    with visit(browser, dashboard.address) as opened:
        page = opened.open("first/rollouts", {"step": 3, "sample": "99999-0"})
        expect(page.get_by_role("heading", name="Answer 99999-0 was not found.")).to_be_visible()


def test_a_step_of_the_address_that_is_not_there_is_named(visitor: Visit):
    page = visitor.open("first/rollouts", {"step": 999_999})
    expect(page.get_by_label("Steps and groups")).to_contain_text("Step 999\u202f999")
    expect(page.get_by_label("Steps and groups")).to_contain_text("No group of this step was recorded.")


def test_an_answer_before_the_first_step_chooses_no_step(visitor: Visit):
    page = visitor.open("first/rollouts", {"list": "answers", "status": "eval"})
    page.get_by_role("listbox").get_by_role("option").nth(1).click()
    expect(page).to_have_url(re.compile("sample=eval"))
    assert "step=-1" not in page.url
    page.get_by_role("button", name="step", exact=True).click()
    expect(page.get_by_label("Steps and groups")).to_contain_text("Step 11")


def test_an_answer_is_shown_on_the_timeline_when_it_ran(visitor: Visit, runs: Path):
    query = "select sample_id, started_at, finished_at from samples where step = -1 limit 1"
    (row,) = Run(runs / "first").sql(query).to_dicts()
    params = {"list": "answers", "attempt": 1, "sample": row["sample_id"]}
    visitor.open("first/rollouts", params).get_by_role("link", name="Show on the timeline").click()
    visitor.page.wait_for_url("**/timeline?**")
    (began,) = Run(runs / "first").sql("select started_at from runs").to_dicts()
    start, end = re.findall(r"-?[\d.]+", parse_qs(visitor.page.url)["t"][0].replace("--", "- -"))
    origin = began["started_at"]
    assert float(start) < row["started_at"] - origin < row["finished_at"] - origin < abs(float(end))


def test_the_range_of_the_ruler_is_that_of_each_page(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"range": "3-5"})
    expect(page.get_by_label("Steps and groups")).to_contain_text("Step 5")
    page = visitor.open("first/evals", {"range": "3-9"})
    expect(page.locator(".evals .first table tbody tr")).to_have_count(1)
    page = visitor.open("first/timeline", {"range": "3-5"})
    page.wait_for_url("**t=*")
    query = "select min(started_at) as start, max(ended_at) as end, (select started_at from runs) as origin from steps"
    (times,) = Run(runs / "first").sql(f"{query} where step between 3 and 5").to_dicts()
    low, high = map(float, parse_qs(page.url)["t"][0].split("-"))
    around = 0.02 * (times["end"] - times["start"])
    assert low == pytest.approx(times["start"] - times["origin"] - around, abs=0.01)
    assert high == pytest.approx(times["end"] - times["origin"] + around, abs=0.01)


def test_copy_link_copies_the_address(visitor: Visit):
    page = visitor.open("first/metrics", {"smooth": "0.5"})
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url


def test_a_link_is_copied_also_where_the_browser_has_no_clipboard(visitor: Visit):
    # As for a page of another machine without https.
    visitor.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page = visitor.open("first/logs")
    link = page.url
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    search = page.get_by_role("searchbox", name="Search all lines")
    search.focus()
    page.keyboard.press("Control+v")
    expect(search).to_have_value(link)
