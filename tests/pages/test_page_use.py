"""Pages by keyboard alone, and views that are addresses."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.pages.page_visit import PLACES, Visit, visit

from telescope.record.reader import Run

WATCH_FOCUS = """() => {
  window.focused = new Set();
  document.addEventListener("focusin", (event) => window.focused.add(event.target));
  const controls = "a[href], button, input, select, textarea, summary, [role=button], [role=slider], [tabindex='0']";
  window.controls = [...document.querySelectorAll(controls)].filter((one) =>
    one.checkVisibility({ visibilityProperty: true }) && !one.disabled && one.tabIndex >= 0 &&
    !one.closest("dialog, [popover]"));
}"""

NOT_FOCUSED = """() => window.controls
  .filter((one) => one.isConnected && !window.focused.has(one))
  .map((one) => one.outerHTML.slice(0, 160))"""

MOUSE_ONLY = """() => [...document.querySelectorAll("body *")]
  .filter((one) => getComputedStyle(one).cursor === "pointer")
  .filter((one) => getComputedStyle(one.parentElement).cursor !== "pointer")
  .filter((one) => !one.closest("a[href], button, input, select, label, summary, [tabindex='0'], [role=listbox]"))
  .filter((one) => !one.querySelector("a[href], button, input, select"))
  .map((one) => one.outerHTML.slice(0, 160))"""
"""What a mouse can press, outside of everything that the keyboard reaches."""


TABS_AT_ONCE, MOST_TABS = 25, 20
"""Lists grow while the focus goes through them."""


def view(page: Page) -> tuple[str, str, list[str]]:
    """What a page shows: its address, its text, and the state of its controls."""
    states = page.locator("main button[aria-pressed], main input, main select, main [aria-checked]").evaluate_all(
        "(all) => all.map((one) => `${one.value ?? ''} ${one.checked ?? ''} ${one.ariaPressed} ${one.ariaChecked}`)"
    )
    return page.url, page.locator("main").inner_text(), states


@pytest.mark.parametrize("name", PLACES)
def test_tab_reaches_every_control(visitor: Visit, name: str):
    page = visitor.open(*PLACES[name])
    page.evaluate(WATCH_FOCUS)
    for _ in range(MOST_TABS):
        for _ in range(TABS_AT_ONCE):
            page.keyboard.press("Tab")
        if not (left := page.evaluate(NOT_FOCUSED)):
            break
    assert left == []
    assert page.evaluate(MOUSE_ONLY) == []


def test_arrows_go_through_the_tree_of_metrics(visitor: Visit):
    page = visitor.open("first/metrics", {"search": "entropy"})
    page.get_by_role("searchbox", name="Filter metrics").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name="entropy", exact=True).first).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**metric=*entropy*")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    visitor.settle()
    expect(page.locator(".charts figure .name", has_text="entropy").first).to_be_visible()


def test_the_palette_opens_a_page_a_metric_and_a_run(visitor: Visit):
    page = visitor.open("first/overview")
    for text, url in (
        ("timeline", "#/first/timeline"),
        ("grad_norm", "metric=grad_norm"),
        ("second", "#/second/overview"),
    ):
        page.keyboard.press("Control+k")
        expect(page.get_by_role("combobox", name="Search everything")).to_be_focused()
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.wait_for_url(lambda address, url=url: url in address)
        visitor.settle()


def test_keys_lead_to_every_page_and_are_listed(visitor: Visit):
    page = visitor.open("first/overview")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_contain_text("next run") if page.url.endswith("#/") else expect(keys).to_contain_text("step before")
    page.keyboard.press("Escape")
    expect(keys).to_be_hidden()
    for key, name in {
        "m": "metrics",
        "s": "rollouts",
        "t": "timeline",
        "i": "infra",
        "e": "evals",
        "l": "logs",
    }.items():
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/#/first/{name}*")
        visitor.settle()


def groups_of(runs: Path, step: int) -> list[int]:
    """The groups of a step, in their order."""
    found = Run(runs / "first").sql(f"select group_id from groups where step = {step} order by group_id")
    return [row["group_id"] for row in found.to_dicts()]


def test_keys_move_through_steps_groups_and_answers(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"step": 5})
    title = page.get_by_label("Conversation").locator(".ttl b")
    first, second = groups_of(runs, 5)[:2]
    expect(title).to_have_text(f"{first}-0")
    moves = {"l": f"{first}-1", "h": f"{first}-0", "j": f"{second}-0", "k": f"{first}-0"}
    for key, sample in moves.items():
        page.keyboard.press(key)
        expect(title).to_have_text(sample)
    for key, step in (("]", 6), ("]", 7), ("[", 6)):
        page.keyboard.press(key)
        page.wait_for_url(f"**step={step}*")
    page.keyboard.press("/")
    expect(page.get_by_label("Search all answers and prompts")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.wait_for_url(lambda address: "step=" not in address)


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
            page.get_by_role("button", name="Time", exact=True).click()
            page.get_by_title("Choose: spread").click()
            page.get_by_role("menuitem", name="Standard deviation").click()
            page.get_by_role("button", name="Log", exact=True).click()
            page.get_by_role("slider", name="Smooth").fill("0.9")
            page.get_by_role("searchbox", name="Filter metrics").fill("norm")
        case "rollouts":
            page.get_by_role("checkbox", name="discarded").click()
            page.get_by_label("Order").select_option("-completion_tokens")
            page.get_by_label("Search all answers and prompts").fill("the")
            page.get_by_role("listbox").get_by_role("option").nth(2).click()
            page.get_by_role("button", name="raw").click()
        case "timeline":
            page.keyboard.press("]")
            page.keyboard.press("+")
            page.keyboard.press("ArrowRight")
        case "infra":
            page.keyboard.press("]")
        case "evals":
            page.get_by_role("button", name="algebra").click()
            page.keyboard.press("j")
        case "logs":
            page.get_by_role("button", name="info", exact=True).click()
            page.get_by_label("Search all lines").fill("step 3")
        case "compare":
            page.get_by_role("button", name="Everything").click()
            page.get_by_role("searchbox", name="Filter settings").fill("m")
        case "code":
            page.get_by_label("Compare with").select_option("")


@pytest.mark.parametrize("name", PLACES)
def test_an_address_opens_the_same_view_elsewhere(visitor: Visit, browser: Browser, name: str):
    page = visitor.open(*PLACES[name])
    before = page.url
    act(page, name)
    visitor.settle()
    # The address follows typing and zooming after a moment.
    page.wait_for_timeout(300)
    visitor.settle()
    assert page.url != before
    with visit(browser, visitor.address) as other:
        other.page.goto(page.url)
        other.settle()
        assert view(other.page) == view(page)


def test_back_undoes_a_selection(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"step": 5})
    title = page.get_by_label("Conversation").locator(".ttl b")
    first, second = groups_of(runs, 5)[:2]
    expect(title).to_have_text(f"{first}-0")
    page.keyboard.press("j")
    expect(title).to_have_text(f"{second}-0")
    page.go_back()
    expect(title).to_have_text(f"{first}-0")


def test_copy_link_copies_the_address(visitor: Visit):
    page = visitor.open("first/metrics", {"smooth": "0.5"})
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url
