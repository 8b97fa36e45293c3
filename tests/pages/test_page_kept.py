"""What a user keeps stays, and a run in one file shows what the server shows."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect
from tests.browser import DashboardProcess
from tests.integration.trackers.fake_wandb import FakeWandb, StoredRun
from tests.pages.page_visit import Visit, visit
from tests.pages.test_every_page import findings

from telescope.cli.ui import export
from telescope.trackers.wandb import VERSION_KEY


def test_a_note_is_written_by_keys_and_stays(visitor: Visit):
    page = visitor.open("first/overview", {"step": 4})
    page.keyboard.press("n")
    page.keyboard.type("Watch the entropy.")
    page.get_by_role("textbox", name="at step").fill("4a")
    text = page.get_by_role("textbox", name="Note")
    text.press("Control+Enter")
    expect(text).to_be_visible()  # no step: not about the whole run
    page.get_by_role("textbox", name="at step").fill("4")
    text.press("Control+Enter")
    expect(page.get_by_role("complementary")).to_contain_text("step 4")
    visitor.settle()
    again = visitor.open("first/metrics")
    expect(again.locator(".ruler title", has_text="step 4: Watch the entropy.")).to_have_count(1)
    other = visitor.open("second/overview")
    expect(other.get_by_text("Watch the entropy.")).to_have_count(0)


def test_the_overview_keeps_the_charts_that_were_chosen(visitor: Visit):
    page = visitor.open("first/overview")
    page.get_by_role("button", name="Choose charts").click()
    page.get_by_role("button", name="Take reward away").click()
    page.get_by_role("searchbox", name="Search what can be shown").fill("grad_norm")
    page.get_by_role("button", name="grad_norm", exact=True).click()
    page.keyboard.press("Escape")
    visitor.settle()
    titles = visitor.open("second/overview").locator(".chart .name")
    expect(titles.first).not_to_have_text("Reward")
    expect(titles.last).to_have_text("grad_norm")
    page.get_by_role("button", name="Choose charts").click()
    page.get_by_role("button", name="Reset").click()
    visitor.settle()


def test_runs_are_filtered_by_a_setting_and_grouped_over_seeds(visitor: Visit):
    page = visitor.open("", {"search": "algorithm=rloo", "columns": "config.algorithm,last.entropy"})
    rows = page.locator("tbody tr:not([aria-hidden])")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("other")
    expect(rows).to_contain_text("0.935")
    page = visitor.open("", {"group": "config.model", "columns": "last.entropy"})
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="model tiny 2 runs")).to_have_count(1)
    page.get_by_role("button", name="model tiny").click()
    expect(rows).to_have_count(4)


def test_selecting_a_text_beyond_the_edge_of_its_dialog_does_not_close_it(visitor: Visit):
    page = visitor.open("first/overview")
    page.keyboard.press("n")
    field = page.get_by_label("Note", exact=True)
    field.fill("not to be lost")
    box = field.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 80, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(5, box["y"] + 12, steps=4)
    page.mouse.up()
    expect(field).to_have_value("not to be lost")
    page.mouse.click(5, box["y"] + 12)
    expect(page.locator("dialog[open]")).to_have_count(0)


def test_chosen_runs_are_compared(visitor: Visit):
    page = visitor.open("")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    page.keyboard.press("d")
    row = page.locator("tr", has_text="algorithm")
    expect(row).to_contain_text("grpo")
    expect(row).to_contain_text("rloo")
    page.get_by_role("link", name="compare files").click()
    changed = page.get_by_role("region", name="Changes of sources/train.py")
    expect(changed).to_contain_text("algorithm = 'grpo'")
    expect(changed).to_contain_text("algorithm = 'rloo'")
    expect(changed.locator(".hljs-string")).to_have_count(2)
    # One line of the only file differs.
    expect(page.get_by_role("navigation", name="Files").locator(".plus, .minus")).to_have_text(["+1", "\u22121"])


def test_a_run_in_one_file_opens_without_a_server(browser: Browser, runs: Path, tmp_path: Path):
    export(runs / "resumed", tmp_path / "run.html")
    with visit(browser, "") as opened:
        page = opened.page
        page.goto((tmp_path / "run.html").as_uri())
        expect(page.get_by_role("banner")).to_contain_text("exported")
        expect(page.get_by_label("Health")).to_contain_text("Entropy")
        for title, text in {"Metrics": "entropy", "Answers": "the answer_", "Evals": "math"}.items():
            page.get_by_role("navigation", name="Pages").get_by_role("link", name=title).click()
            expect(page.locator("main")).to_contain_text(text)
        assert opened.problems == []
        assert {url.split(":")[0] for url in opened.requested} <= {"file", "blob", "data"}


def test_a_run_in_one_file_opens_in_a_frame_without_storage(browser: Browser, runs: Path, tmp_path: Path):
    export(runs / "resumed", tmp_path / "run.html")
    outer = '<iframe width=1200 height=700 sandbox="allow-scripts" src="http://run.example/">'
    with visit(browser, "") as opened:
        opened.page.route("http://outer.example/", lambda route: route.fulfill(body=outer, content_type="text/html"))
        opened.page.route("http://run.example/", lambda route: route.fulfill(path=tmp_path / "run.html"))
        opened.page.goto("http://outer.example/")
        inside = opened.page.frame_locator("iframe")
        expect(inside.get_by_role("banner")).to_contain_text("exported")
        inside.get_by_role("button", name="Theme: system").click()
        expect(inside.locator("html")).to_have_attribute("data-theme", "light")
        inside.get_by_role("link", name="Metrics").click()
        expect(inside.locator("main")).to_contain_text("entropy")
        assert opened.problems == []


def test_projects_on_wandb_are_added_and_removed_by_keys(browser: Browser, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with FakeWandb() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        for project in ("mine", "team"):
            server.add_run(project, StoredRun(project, f"run of {project}", state="finished"))
        server.run("mine", "mine").config[VERSION_KEY] = "1"
        with DashboardProcess() as dashboard, visit(browser, dashboard.address) as visitor:
            page = visitor.open("")
            expect(page.get_by_role("link", name="run of mine")).to_be_visible()
            page.get_by_role("button", name="W&B projects").press("Enter")
            page.keyboard.type("https://wandb.ai/someone/team/runs/x")
            page.keyboard.press("Enter")
            dialog = page.get_by_role("dialog", name="Projects on W&B")
            expect(
                dialog.get_by_text("Runs of another layout, without a record of Telescope: run of team")
            ).to_be_visible()
            assert findings(page) == []
            dialog.get_by_role("button", name="Remove someone/mine").press("Enter")
            expect(page.get_by_text("run of mine")).to_have_count(0)
            expect(dialog.get_by_role("button", name="Show again someone/mine")).to_be_visible()
            page.keyboard.press("Escape")
            expect(dialog).to_be_hidden()
