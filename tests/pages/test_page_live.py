"""Pages of a run that is being written: they follow it, and lose nothing while the server is away."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.pages.page_visit import Visit, visit
from tests.unit.dashboard.conftest import NUM_STEPS, write_step

from telescope.record.recorder import Recorder
from telescope.record.run_info import RunInfo, begin_run, end_run
from telescope.testing.browser import DashboardProcess

CONFIG = json.dumps({"values": {"model": "tiny", "environments": []}, "user_set": []})


class LiveRun:
    """A run of this process, a step at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.name = run_dir.name
        self.recorder = Recorder(run_dir, flush_seconds=0.05)
        self.info: RunInfo = begin_run(
            self.recorder, name=self.name, config_hash="c", config_json=CONFIG, first_step=0, num_steps=NUM_STEPS
        )
        self.steps = 0

    def step(self) -> None:
        """Writes the next step; it is on disk when this returns."""
        write_step(self.recorder, self.steps)
        self.steps += 1
        assert self.recorder.flush()

    def end(self) -> None:
        end_run(self.recorder, self.info, "finished", config_json=CONFIG)
        assert self.recorder.flush()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    """A run with three steps."""
    run = LiveRun(tmp_path / "live")
    for _ in range(3):
        run.step()
    yield run
    run.recorder.close()


@pytest.fixture
def server(live: LiveRun) -> Iterator[DashboardProcess]:
    """A server of one test, which may end it."""
    with DashboardProcess(live.recorder.files.run_dir) as process:
        yield process


def test_pages_follow_a_run(browser: Browser, server: DashboardProcess, live: LiveRun):
    names = ("overview", "metrics", "rollouts", "timeline", "infra", "logs")
    with ExitStack() as stack:
        visits: dict[str, Visit] = {}
        for name in names:
            visits[name] = stack.enter_context(visit(browser, server.address))
            visits[name].page.goto(f"{server.address}#/{live.name}/{name}")
        for one in visits.values():
            expect(one.page.get_by_label("Progress").first).to_contain_text("Step 3")
            expect(one.page.get_by_role("banner")).to_contain_text("training")
        live.step()
        for one in visits.values():
            expect(one.page.get_by_label("Progress").first).to_contain_text("Step 4")
        tree = visits["metrics"].page.get_by_role("complementary", name="Metrics")
        expect(tree.locator('[title="entropy"] .r')).to_have_text("0.970")
        expect(visits["logs"].page.get_by_role("log")).to_contain_text("step 3 of it")
        # What a person reads stays: the page offers the newer step.
        visits["rollouts"].page.get_by_role("button", name="1 newer").click()
        expect(visits["rollouts"].page.get_by_label("Steps and groups")).to_contain_text("Step 3")
        live.end()
        for one in visits.values():
            expect(one.page.get_by_role("banner")).to_contain_text("finished", timeout=15_000)
            assert one.problems == []


def test_a_page_misses_nothing_while_the_server_is_away(browser: Browser, server: DashboardProcess, live: LiveRun):
    with visit(browser, server.address) as opened:
        page = opened.open(f"{live.name}/metrics", {"metric": "entropy"})
        state = page.get_by_role("banner")
        expect(state).to_contain_text("training")
        server.kill()
        expect(state).to_contain_text("reconnecting")
        live.step()
        live.step()
        server.start()
        expect(state).to_contain_text("training", timeout=20_000)
        expect(page.get_by_label("Progress").first).to_contain_text("Step 5")
        live.step()
        expect(page.get_by_label("Progress").first).to_contain_text("Step 6")
        page.get_by_role("button", name="More for entropy").first.click()
        with page.expect_download() as begun:
            page.get_by_role("menuitem", name="Save as CSV").click()
        saved = list(csv.reader(begun.value.path().read_text().splitlines()))[1:]
        assert [int(step) for step, _ in saved] == list(range(6))
