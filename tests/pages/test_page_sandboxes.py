"""Sandboxes on the pages: their numbers on Infra, their calls on the timeline, their ids in a conversation."""

from __future__ import annotations

from playwright.sync_api import expect
from tests.pages.page_visit import Visit
from tests.pages.test_every_page import PHONE, findings
from tests.pages.test_page_timeline import RECTANGLES, TALL
from tests.unit.dashboard.conftest import NUM_STEPS, sample_rows

AXIS = 23
"""Height of the axis, above the lanes."""
STEP = NUM_STEPS - 1
SAMPLE = sample_rows(STEP)[0]["sample_id"]
"""The sample of the run `resumed` that used a sandbox."""


def test_infra_has_numbers_of_sandboxes_if_there_are_any(visitor: Visit):
    page = visitor.open("resumed/infra")
    section = page.get_by_role("region", name="Sandboxes")
    for title in ("Alive", "Created", "Commands", "Failures"):
        expect(section.get_by_text(title, exact=True)).to_be_visible()
    expect(section.get_by_role("row").nth(1)).to_have_text("exec20.300 s0.390 s")
    assert findings(page) == []
    page.set_viewport_size(PHONE)
    visitor.settle()
    assert page.locator("main").evaluate("(main) => main.scrollWidth") <= PHONE["width"]
    page.set_viewport_size(TALL)
    page = visitor.open("first/infra")
    expect(page.get_by_role("region", name="Machines").first).to_be_visible()
    expect(page.get_by_role("region", name="Sandboxes")).to_have_count(0)


def test_the_timeline_shows_the_calls_of_a_sandbox_beside_those_of_tools(visitor: Visit):
    visitor.page.add_init_script(RECTANGLES)
    visitor.page.set_viewport_size(TALL)
    page = visitor.open("resumed/timeline", {"step": STEP, "sample": SAMPLE, "attempt": 2, "path": 0})
    panel = page.get_by_label("Step and request")
    expect(panel.get_by_role("heading", name="Sandbox local-7f")).to_be_visible()
    expect(panel).to_contain_text("queue0.200 s")
    expect(panel).to_contain_text("exec, 2 calls0.600 s, CommandTimeout")
    expect(page.get_by_label("Colors")).to_contain_text("sandbox")
    color = page.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--c6').trim()")
    drawn = [rectangle for rectangle in page.evaluate("() => window.frame") if rectangle[0] == color]
    assert drawn, "a stripe in the slot"
    _, _, x, y, width, height = drawn[0]
    assert height < 8
    canvas = page.locator(".tlc canvas").bounding_box()
    page.mouse.move(canvas["x"] + x + width / 2, canvas["y"] + AXIS + y + height / 2)
    expect(page.locator(".tlc .said")).to_contain_text(f"{SAMPLE}, kept, sandbox ")
    expect(visitor.open("first/timeline").get_by_label("Colors")).not_to_contain_text("sandbox")


def test_a_tool_call_names_its_sandbox(visitor: Visit):
    page = visitor.open("resumed/rollouts", {"step": STEP, "sample": SAMPLE, "attempt": 2, "view": "text"})
    expect(page.get_by_label("Conversation", exact=True)).to_contain_text("sandbox local-7f")
