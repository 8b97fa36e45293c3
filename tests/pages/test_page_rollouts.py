"""Rollouts: what stays in its place, folding, hits of a search, squares, and the page of a prompt."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.pages.page_visit import DashboardThread, Visit, groups_of, visit
from tests.pages.test_every_page import findings

from telescope.record.reader import Run

TOKENS = """() => {
  const tokens = ["neg", "pos", "heat"].map((tint) => `<span class="${tint}">token</span>`).join("");
  const message = `<div class="msg think"><span></span><div class="flow">${tokens}</div></div>`;
  document.querySelector(".conv").insertAdjacentHTML("beforeend", message);
}"""


def conversation(page: Page) -> Locator:
    return page.get_by_label("Conversation", exact=True)


def top(place: Locator) -> float:
    box = place.bounding_box()
    return box["y"]


def test_siblings_stay_in_their_place_and_folds_stay_when_the_answer_changes(visitor: Visit, runs: Path):
    group = groups_of(runs, 5)[0]
    page = visitor.open("first/rollouts", {"step": 5, "view": "text"})
    siblings = page.get_by_label("Answers of the group").get_by_role("table")
    places = [top(siblings)]
    user = conversation(page).get_by_role("button", name="user", exact=True)
    user.press("Enter")
    expect(user).to_have_attribute("aria-expanded", "false")
    for index in (1, 2):
        page.keyboard.press("l")
        expect(conversation(page).locator(".ttl b")).to_have_text(f"{group}-{index}")
        expect(user).to_have_attribute("aria-expanded", "false")
        places.append(top(siblings))
    assert len(set(places)) == 1
    page.keyboard.press("z")
    expect(conversation(page).locator("button.fb[aria-expanded=true]")).to_have_count(0)
    page.keyboard.press("z")
    expect(conversation(page).locator("button.fb[aria-expanded=false]")).to_have_count(0)


def test_a_tall_window_has_every_answer_of_the_list_also_after_a_failed_read(
    browser: Browser, dashboard: DashboardThread
):
    with visit(browser, dashboard.address, viewport={"width": 1280, "height": 4000}) as opened:
        opened.page.route("**/samples?*offset=100*", lambda route: route.fulfill(status=503, body="{}"), times=1)
        page = opened.open("first/rollouts", {"list": "answers"})
        rows = page.get_by_role("listbox", name="Answers of all steps").locator(".ar")
        expect(rows.nth(150)).to_be_attached()
        expect(rows.filter(has_text=re.compile("^…$"))).to_have_count(0)


def test_enter_opens_the_first_hit_of_a_search_at_its_match(visitor: Visit):
    page = visitor.open("first/rollouts")
    field = page.get_by_label("Search all answers and prompts")
    field.fill("</ANSWER>")
    field.press("Enter")
    hits = page.get_by_role("listbox", name="Answers of all steps").get_by_role("option")
    expect(hits.first).to_have_attribute("aria-selected", "true")
    expect(hits.first.locator("mark").first).to_have_text("</answer>")
    assert re.match(r"step ◇?\d+, \w+", hits.first.inner_text()) and "reward" in hits.first.inner_text()
    expect(conversation(page).locator("mark").first).to_be_in_viewport()
    field.fill("no text has these words")
    expect(page.get_by_label("Steps and groups")).to_contain_text("“no text has these words”")


def test_a_filter_that_no_answer_passes_leaves_no_answer_shown(visitor: Visit):
    page = visitor.open("first/rollouts", {"list": "answers"})
    expect(conversation(page)).to_be_visible()
    page.get_by_label("Search all answers and prompts").fill("no text has these words")
    expect(conversation(page)).to_have_count(0)


def test_squares_by_another_number_are_in_the_address_with_the_ends_of_their_scale(visitor: Visit, runs: Path):
    page = visitor.open("first/rollouts", {"step": 5})
    page.get_by_label("squares by").select_option("length")
    expect(page).to_have_url(re.compile("squares=length"))
    lengths = Run(runs / "first").sql("select completion_tokens as n from samples where step = 5 and group_id >= 0")
    known = [row["n"] for row in lengths.to_dicts()]
    key = page.locator(".fillkey .sq").inner_text().split()
    assert [int(end) for end in key] == [min(known), max(known)]
    tokens = page.get_by_label("Groups of the step").locator(".sq i").first.get_attribute("title") or ""
    assert re.search(r"answer tokens \d+", tokens)


@pytest.fixture
def prompt(runs: Path) -> dict[str, object]:
    """The prompt of the run `first` with the most answers, and its key."""
    query = (
        "select environment, prompt_text, count(*) as n, count_if(metrics['correct'] = 1) as num_right "
        "from samples where reward is not null group by all order by n desc, prompt_text limit 1"
    )
    (row,) = Run(runs / "first").sql(query).to_dicts()
    text = f"{row['environment']}\n{row['prompt_text']}"
    return {**row, "key": hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:12]}


def test_a_prompt_has_a_page_with_its_answers_by_step_and_in_other_runs(visitor: Visit, runs: Path, prompt):
    page = visitor.open("first/rollouts", {"prompt": prompt["key"], "theme": "dark"})
    pane = page.get_by_label("Prompt", exact=True)
    expect(pane).to_contain_text(
        f"of {prompt['n']} answers" if 0 < prompt["num_right"] < prompt["n"] else f"in {prompt['n']} answers"
    )
    assert pane.locator(".pg .sq i").count() == prompt["n"]
    expect(pane.get_by_role("link", name="second")).to_be_visible()
    assert findings(page) == []
    pane.get_by_role("link", name="second").click()
    page.wait_for_url(f"**/#/second/rollouts?*prompt={prompt['key']}*")
    page.go_back()
    pane.get_by_role("row").nth(1).get_by_role("button").click()
    expect(conversation(page)).to_be_visible()
    assert "prompt=" not in page.url


def test_prompts_are_listed_by_their_marks(visitor: Visit, runs: Path):
    query = (
        "select count(*) as total, count_if(num_right = 0) as never from (select environment, prompt_text, "
        "count_if(metrics['correct'] = 1) as num_right from samples where reward is not null group by all)"
    )
    (counted,) = Run(runs / "first").sql(query).to_dicts()
    page = visitor.open("first/rollouts")
    page.get_by_role("button", name="prompts", exact=True).click()
    marks = page.get_by_role("group", name="Prompts solved", exact=True)
    expect(marks.get_by_role("button", name="all", exact=False).first).to_contain_text(str(counted["total"]))
    marks.get_by_role("button", name="never").click()
    expect(page).to_have_url(re.compile("mark=never"))
    expect(marks.get_by_role("button", name="never")).to_contain_text(str(counted["never"]))
    listed = page.get_by_role("listbox", name="Prompts")
    expect(listed.get_by_role("option").first).to_contain_text("never solved")
    page.keyboard.press("j")
    expect(page).to_have_url(re.compile("prompt="))
    visitor.settle()
    assert findings(page) == []


def test_text_on_the_strongest_tint_of_a_token_can_be_read_in_both_themes(visitor: Visit, runs: Path):
    (row,) = Run(runs / "first").sql("select sample_id, step from tokens limit 1").to_dicts()
    for theme in ("light", "dark"):
        params = {"step": row["step"], "sample": row["sample_id"], "view": "surprise", "theme": theme}
        page = visitor.open("first/rollouts", params)
        page.locator("[data-i]").first.wait_for()
        page.evaluate(TOKENS)
        page.locator(".think .flow span").evaluate_all(
            "(all) => all.forEach((one) => one.style.setProperty('--a', '100%'))"
        )
        assert findings(page) == []
