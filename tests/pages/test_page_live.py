"""Pages of a run that is being written: they follow it, and lose nothing while the server is away."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect
from tests.browser import DashboardProcess
from tests.pages.page_visit import DashboardThread, Visit, visit
from tests.unit.dashboard.conftest import write_run

from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run
from telescope.testing.replay import Replay


def test_a_page_says_that_a_restarted_server_has_another_secret(browser: Browser, runs: Path):
    server = DashboardProcess("--host", "127.0.0.1", "--token", runs)
    with server, browser.new_context() as context:
        page, listed = context.new_page(), context.new_page()
        listed.goto(server.address)
        expect(listed.get_by_role("link", name="resumed")).to_be_visible()
        page.goto(f"{server.address.partition('?')[0]}#/resumed/overview")
        expect(page.get_by_label("Health")).to_be_visible()
        server.kill()
        server.start()
        for told in (page.locator("header .state.bad"), listed.locator(".toolbar")):
            expect(told).to_contain_text(re.compile("needs the new address|The token is missing or from another start"))
        page.keyboard.press("g")
        page.keyboard.press("l")
        expect(page.locator("main")).to_contain_text("Open the address that `telescope ui` printed")
        context.new_page().goto(server.address)  # which brings the new secret
        expect(page.get_by_role("log", name="Log lines")).to_be_visible()
        expect(page.locator("header .state.bad")).to_have_count(0)


def test_a_record_of_evals_alone_opens_with_its_answers(browser: Browser, tmp_path: Path):
    with Recorder(tmp_path / "evals") as recorder:
        names = {"eval_id": "e", "step": -1}
        result = {"status": "finished", "source": "standalone", "accuracy": 0.5}
        recorder.write("evals", {**names, "name": "math", **result})
        recorder.write("eval_samples", {**names, "sample_id": "e-0-0", "item": 0, "completion": 0})
        answer = {"group_id": -1, "sample_index": 0, "status": "eval", "eval_name": "math", "environment": "math"}
        recorder.write("samples", {"sample_id": "e-0-0", "step": -1, "reward": 1.0, **answer})
        recorder.write("turns", {"sample_id": "e-0-0", "turn": 0, "role": "assistant", "text": "the only answer"})
    with DashboardThread(tmp_path) as server, visit(browser, server.address) as opened:
        page = opened.open("evals/rollouts")
        expect(page.get_by_label("Answers of all steps").get_by_role("option")).to_have_count(1)
        expect(page.locator(".conv")).to_contain_text("the only answer")
        opened.open("evals/overview")
        expect(page.locator("main")).to_contain_text("The record has no training step. Its evals and its answers")
        assert opened.problems == []


class LiveRun:
    """A replayed run of this process, a step at a time."""

    def __init__(self, replay: Replay) -> None:
        self.run_dir = replay.recorder.files.run_dir
        self._replay = replay

    def step(self) -> None:
        """Writes the next step; it is on disk when this returns."""
        self._replay.write_step(self._replay.step)
        assert self._replay.recorder.flush()

    def generate(self) -> str:
        """Shows what runs early in the next step. Returns the id of one sample."""
        self._replay.write_until(self._replay.step_end(self._replay.step - 1) + 0.3)
        assert self._replay.recorder.flush()
        return Run(self.run_dir).in_flight()["sample_id"][0].as_py()

    def end(self) -> None:
        self._replay.end()
        assert self._replay.recorder.flush()

    def last(self, query: str) -> Any:
        """The only number of a query on what is on disk."""
        ((value,),) = (row.values() for row in Run(self.run_dir).sql(query).to_dicts())
        return value


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    """A run with three steps."""
    with Replay(tmp_path / "live", num_steps=20) as replay:
        run = LiveRun(replay)
        for _ in range(3):
            run.step()
        yield run


@pytest.fixture
def server(live: LiveRun) -> Iterator[DashboardThread]:
    with DashboardThread(live.run_dir) as opened:
        yield opened


def test_pages_follow_a_run(browser: Browser, server: DashboardThread, live: LiveRun):
    names = ("overview", "metrics", "rollouts", "logs")
    with ExitStack() as stack:
        visits: dict[str, Visit] = {}
        for name in names:
            visits[name] = stack.enter_context(visit(browser, server.address))
            visits[name].page.goto(f"{server.address}#/live/{name}")
        for one in visits.values():
            expect(one.page.get_by_label("Progress").first).to_contain_text("3 of 20 steps")
            expect(one.page.get_by_role("banner")).to_contain_text("training")
        expect(visits["rollouts"].page.get_by_label("Steps and groups")).to_contain_text("Step 2")
        live.step()
        for one in visits.values():
            expect(one.page.get_by_label("Progress").first).to_contain_text("4 of 20 steps")
        tree = visits["metrics"].page.get_by_role("complementary", name="Metrics")
        entropy = live.last("select metrics['entropy'] from steps where step = 3")
        expect(tree.locator('[title="entropy"] .r')).to_have_text(f"{entropy:#.3g}")
        newest = live.last("select message from logs order by time desc limit 1")
        expect(visits["logs"].page.get_by_role("log")).to_contain_text(newest.splitlines()[0])
        # What a person reads stays: the page offers the newer step.
        visits["rollouts"].page.get_by_role("button", name="1 newer").click()
        expect(visits["rollouts"].page.get_by_label("Steps and groups")).to_contain_text("Step 3")
        live.end()
        for one in visits.values():
            expect(one.page.get_by_role("banner")).to_contain_text("finished", timeout=15_000)
            assert one.problems == []


def test_groups_are_listed_before_the_first_step_has_ended(browser: Browser, tmp_path: Path):
    with Replay(tmp_path / "early", num_steps=20) as replay:
        replay.write_until(replay.step_end(0) - 0.5)
        assert replay.recorder.flush()
        groups = Run(tmp_path / "early").sql("select group_id from groups where step = 0").to_dicts()
        assert groups
        with DashboardThread(tmp_path / "early") as server, visit(browser, server.address) as opened:
            listed = opened.open("early/rollouts").get_by_label("Steps and groups")
            expect(listed).to_contain_text(f"Step 0 {len(groups)} groups")
            expect(opened.page.locator(".conv")).to_be_visible()
            assert opened.problems == []


def test_pages_of_runs_that_failed_at_their_start_wait_for_nothing(browser: Browser, tmp_path: Path):
    for folder in ("a", "b"):
        with Recorder(tmp_path / folder) as recorder:
            info = begin_run(recorder, name="same", config_hash="c", config_json="{}", first_step=0, num_steps=3)
            end_run(recorder, info, "failed", config_json="{}", error="it broke")
    with DashboardThread(tmp_path) as server, visit(browser, server.address) as opened:
        for name in ("metrics", "rollouts", "timeline"):
            page = opened.open(f"a/{name}")
            expect(page.get_by_role("heading", name="This run ended before its first step.")).to_be_visible()
        heads = opened.open("a/compare", {"with": "b"}).get_by_role("columnheader").get_by_role("link")
        assert heads.all_inner_texts() == ["same a", "same b"]
        assert opened.problems == []
        page = opened.open("c/overview")
        expect(page.get_by_role("heading", name="This run was not found.")).to_be_visible()
        expect(page.get_by_role("banner")).not_to_contain_text("reconnecting")


def test_an_alert_that_is_open_when_the_run_ends_is_closed_then(browser: Browser, tmp_path: Path):
    with Recorder(tmp_path / "run") as recorder:
        info = begin_run(recorder, name="run", config_hash="c", config_json="{}", first_step=0, num_steps=3)
        recorder.write(
            "steps", {"step": 0, "started_at": info.started_at, "ended_at": info.started_at + 1, "metrics": {}}
        )
        alert = {"time": info.started_at + 1, "level": "warning", "kind": "server", "step": 0}
        recorder.write("alerts", {**alert, "message": "Server 0 is down. Look at its log."})
        assert recorder.flush()
        with DashboardThread(tmp_path / "run") as server, visit(browser, server.address) as opened:
            page = opened.open("run/overview")
            expect(page.get_by_role("img", name="open", exact=True)).to_be_visible()
            end_run(recorder, info, "finished", config_json="{}")
            expect(page.get_by_role("img", name="closed at the end")).to_be_visible()
            expect(page.get_by_role("heading", name="Alerts 1 closed")).to_be_visible()
            assert opened.problems == []


def test_a_request_is_on_the_timeline_before_it_ends(browser: Browser, server: DashboardThread, live: LiveRun):
    with visit(browser, server.address) as opened:
        page = opened.open("live/timeline", {"sample": live.generate()})
        expect(page.get_by_label("Step and request")).to_contain_text("It has been running for")
        assert opened.problems == []


def test_the_panel_of_the_timeline_holds_the_last_step(browser: Browser, server: DashboardThread, live: LiveRun):
    with visit(browser, server.address) as opened:
        page = opened.open("live/timeline", {"follow": 1})
        said = page.locator(".p3 .vd")
        expect(said).to_be_visible()
        page.evaluate(
            "() => { window.blank = 0; const look = () => { window.blank += !document.querySelector('.p3 .vd'); };"
            "new MutationObserver(look).observe(document.body, { subtree: true, childList: true }); }"
        )
        for number in (4, 5, 6):
            live.step()
            expect(page.get_by_label("Progress").first).to_contain_text(f"{number} of 20 steps")
        opened.settle()
        expect(said).to_be_visible()
        assert page.evaluate("() => window.blank") == 0
        assert opened.problems == []


def test_logs_come_also_if_a_read_takes_longer_than_the_run_needs_for_new_lines(
    browser: Browser, server: DashboardThread, live: LiveRun
):
    held: list[Route] = []
    with visit(browser, server.address) as opened:
        opened.page.route("**/logs?*", lambda route: held.append(route))
        with opened.page.expect_request("**/logs?*"):
            opened.page.goto(f"{server.address}#/live/logs")
        live.step()
        expect(opened.page.get_by_label("Progress").first).to_contain_text("4 of 20 steps")
        held[0].continue_()
        expect(opened.page.get_by_label("Log lines").locator(".lg").first).to_be_visible()


def test_logs_of_an_ended_run_that_could_not_be_read_are_read_again(browser: Browser, dashboard: DashboardThread):
    with visit(browser, dashboard.address) as opened:
        opened.page.route("**/logs?*", lambda route: route.fulfill(status=503, body="{}"), times=1)
        opened.page.goto(f"{opened.address}/#/first/logs")
        expect(opened.page.get_by_role("heading", name="The server failed.")).to_be_visible()
        expect(opened.page.get_by_label("Log lines").locator(".lg").first).to_be_visible()


def test_a_page_misses_nothing_while_the_server_is_away(browser: Browser, live: LiveRun):
    with DashboardProcess(live.run_dir) as server, visit(browser, server.address) as opened:
        page = opened.open("live/metrics", {"metric": "entropy"})
        state = page.get_by_role("banner")
        expect(state).to_contain_text("training")
        server.kill()
        expect(state).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d, reconnecting"))
        expect(state.locator(".state.live")).to_have_count(0)
        live.step()
        live.step()
        server.start()
        expect(state).to_contain_text("training", timeout=20_000)
        expect(page.get_by_label("Progress").first).to_contain_text("5 of 20 steps")
        live.step()
        expect(page.get_by_label("Progress").first).to_contain_text("6 of 20 steps")
        page.get_by_role("button", name="More for entropy").first.click()
        with page.expect_download() as begun:
            page.get_by_role("menuitem", name="Save as CSV").click()
        saved = list(csv.reader(begun.value.path().read_text().splitlines()))[1:]
        assert [int(step) for step, _ in saved] == list(range(6))


def test_a_page_opened_while_the_server_is_away_comes_with_it(browser: Browser, runs: Path):
    with DashboardProcess(runs) as server, visit(browser, server.address) as opened:
        page = opened.open("first/overview")
        server.kill()
        page.get_by_role("link", name="Evals").first.click()
        expect(page.get_by_role("heading", name="The server did not answer.")).to_be_visible()
        server.start()
        expect(page.get_by_role("main")).to_contain_text("Every eval")


def test_a_page_says_that_its_run_was_removed_until_it_is_back(browser: Browser, tmp_path: Path):
    write_run(tmp_path / "run", "grpo")
    with DashboardThread(tmp_path) as server, visit(browser, server.address) as opened:
        page = opened.open("run/overview")
        moved = (tmp_path / "run").rename(tmp_path / ".moved")
        expect(page.get_by_role("heading", name="This run was removed or moved.")).to_be_visible()
        expect(page.get_by_role("banner")).to_contain_text("removed")
        expect(page.get_by_label("Progress")).to_have_count(0)
        moved.rename(tmp_path / "run")
        expect(page.get_by_role("banner")).to_contain_text("finished")
        expect(page.get_by_label("Progress").first).to_contain_text("12 of 12 steps")
