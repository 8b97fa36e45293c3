"""Pages by keyboard alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.pages.page_visit import PLACES, Visit, groups_of

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


def test_brackets_that_a_keyboard_writes_with_option_are_keys_too(visitor: Visit):
    page = visitor.open("first/overview", {"step": 4})
    page.keyboard.down("Alt")
    page.keyboard.press("]")
    page.wait_for_url("**step=5*")
    page.keyboard.press("n")  # a letter with Alt is the browser's
    page.keyboard.up("Alt")
    expect(page.locator("dialog[open]")).to_have_count(0)


def test_enter_that_chooses_a_character_opens_nothing(visitor: Visit):
    page = visitor.open("first/overview")
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Search everything")
    field.fill("timeline")
    pressed = {"key": "Enter", "bubbles": True, "cancelable": True}
    field.dispatch_event("keydown", {**pressed, "isComposing": True})
    expect(field).to_be_visible()
    field.dispatch_event("keydown", pressed)
    page.wait_for_url("**/timeline*")


def test_the_palette_opens_a_page_a_metric_and_a_run(visitor: Visit):
    page = visitor.open("first/overview")
    for text, url in (
        ("timeline", "#/first/timeline"),
        ("grad_norm", "metric=grad_norm"),
        ("step 7", "#/first/metrics?metric=grad_norm&step=7"),
        ("learning_rate setting", "setting=learning_rate"),
        ("second", "#/second/overview"),
    ):
        page.keyboard.press("Control+k")
        expect(page.get_by_role("combobox", name="Search everything")).to_be_focused()
        page.keyboard.type(text)
        page.keyboard.press("Enter")
        page.wait_for_url(lambda address, url=url: url in address)
        visitor.settle()


def test_each_key_of_the_list_does_one_thing_of_its_page(visitor: Visit):
    for place, named in {
        "": "next run", "first/rollouts": "next group", "first/timeline": "zoom in", "first/evals": "next item",
        "first/logs": "follow the newest line", "first/metrics": "log scale", "first/infra": "select a range",
    }.items():  # fmt: skip
        page = visitor.open(place)
        page.keyboard.press("?")
        keys = page.get_by_role("dialog", name="Keys")
        expect(keys).to_contain_text(named)
        own = keys.locator("section", has_not=page.get_by_role("heading", name=re.compile("^(A |The |Tokens)")))
        listed = own.locator("dt > span").all_inner_texts()
        assert len(listed) == len(set(listed)) > 0, place
        assert ("Overview" in keys.inner_text()) == bool(place), "without a run, no key leads to the page of one"


def test_keys_lead_to_every_page_and_are_listed(visitor: Visit):
    page = visitor.open("first/overview")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    expect(keys).to_contain_text("step before")
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


def test_an_answer_is_pinned_beside_the_next(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"step": 5})
    group = groups_of(runs, 5)[0]
    titles = page.get_by_label("Conversation").locator(".ttl b")
    page.keyboard.press("c")
    expect(page.get_by_label("Answer to compare")).to_contain_text("Choose another answer to compare.")
    expect(titles).to_have_text([f"{group}-0"])
    page.keyboard.press("l")
    expect(titles).to_have_text([f"{group}-0", f"{group}-1"])


def test_arrows_go_through_the_tokens_of_an_answer(visitor: Visit, runs: Path):
    (row,) = Run(runs / "first").sql("select sample_id, step from tokens limit 1").to_dicts()
    page = visitor.open("first/rollouts", {"step": row["step"], "sample": row["sample_id"], "view": "surprise"})
    tokens = page.get_by_label("Tokens: arrow keys").first
    tokens.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(tokens.locator(".cur")).to_have_attribute("data-i", "1")


def test_keys_go_through_the_requests_of_the_timeline(visitor: Visit):
    page = visitor.open("first/timeline", {"step": 6})
    chosen = []
    for key in (".", ".", ","):
        page.keyboard.press(key)
        visitor.settle()
        chosen.append(page.get_by_role("heading", name="Request").inner_text())
    assert chosen[0] == chosen[2] != chosen[1]


def test_arrows_go_through_the_steps_of_the_heat_strip(visitor: Visit):
    page = visitor.open("first/rollouts", {"step": 5})
    page.get_by_label("Steps: arrow keys").focus()
    for key, step in (("ArrowRight", 6), ("Home", 0)):
        page.keyboard.press(key)
        page.wait_for_url(f"**step={step}*")
    expect(page.get_by_label("Steps and groups")).to_contain_text("Step 0")


def test_escape_closes_a_menu_before_it_does_anything_else(visitor: Visit):
    page = visitor.open("first/overview", {"step": "3"})
    chart = page.locator("figure.chart").first
    chart.hover()
    chart.locator(".over").click()
    menu = page.locator("[popover]:popover-open")
    expect(menu).to_be_visible()
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    assert "step=3" in page.url
    page.keyboard.press("Escape")
    page.wait_for_url(lambda address: "step=3" not in address)


def test_a_dialog_that_its_own_button_closes_gives_the_focus_back(visitor: Visit):
    page = visitor.open("", {"chosen": "first"})
    opener = page.get_by_role("button", name="Rename")
    opener.click()
    page.get_by_role("button", name="Close, Esc").click()
    expect(opener).to_be_focused()
