"""The rollout of an agent on the pages: a tree of conversations, by mouse and keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from tests.pages.page_visit import DashboardThread, Visit, visit
from tests.pages.test_every_page import findings
from tests.unit.orchestrator.fakes import agent_sample, group

from telescope.orchestrator import record_rows
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run
from telescope.rollout import sample_rows

LONG = "An order of the user. " * 40


@pytest.fixture(scope="module")
def agents(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """The dashboard over a run with one sample of an agent."""
    folder = tmp_path_factory.mktemp("agents")
    made = group([1.0])
    made.samples = [agent_sample()]
    made.samples[0].turns[4].replies[-1] = ("user", LONG)
    of_group = {"status": "kept", "reason": None, "step": 0}
    with Recorder(folder / "run") as recorder:
        info = begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=1)
        prompt = record_rows.prompt_row(made.environment, made.prompt)
        recorder.write("prompts", prompt)
        recorder.write("samples", record_rows.sample_row(made.samples[0], prompt["prompt_key"], **of_group))
        for table, rows_of in {"turns": sample_rows.turn_rows, "tool_calls": sample_rows.tool_call_rows}.items():
            for row in rows_of(made.samples[0]):
                recorder.write(table, row)
        recorder.write("groups", record_rows.group_row(made, **of_group))
        recorder.write("steps", {"step": 0, "version": 1, "started_at": 9.0, "ended_at": 16.0, "metrics": {"x": 1.0}})
        end_run(recorder, info, "finished", config_json="{}")
    with DashboardThread(folder) as process, visit(browser, process.address) as opened:
        yield opened
        assert opened.problems == []


def test_conversations_have_headings_and_can_be_walked_and_folded_by_keys(agents: Visit) -> None:
    page = agents.open("run/rollouts", {"step": 0, "view": "text"})
    pane = page.get_by_label("Conversation", exact=True)
    expect(pane.locator(".chat > h3")).to_have_text([
        "main 2 calls, 4 answer tokens",
        "main branch after call 1 of main, 1 message as before, 1 call, 4 answer tokens",
        "judge 1 call, 2 answer tokens, not trained",
        "main compaction, 1 message as before, 1 call, 5 answer tokens",
    ])  # fmt: skip
    expect(pane.get_by_text("Be brief.", exact=True)).to_have_count(1)
    expect(pane.locator(".res")).to_contain_text("4")
    user = pane.get_by_role("button", name="user", exact=True).last
    expect(user).to_have_attribute("aria-expanded", "false")
    user.press("Enter")
    expect(user).to_have_attribute("aria-expanded", "true")
    for key, place in ((".", 0), (".", 1), (".", 2), (",", 1)):
        page.keyboard.press(key)
        expect(pane.locator(".chat > h3 button").nth(place)).to_be_focused()
    page.keyboard.press("Enter")
    expect(pane.get_by_text("Why not 5?")).to_have_count(0)
    panel = page.get_by_label("Numbers", exact=True)
    for cause in ("branch", "compaction"):
        expect(panel.get_by_text(f"joins, {cause}")).to_be_visible()
    assert findings(page) == []
