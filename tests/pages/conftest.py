"""One record, one server and one browser for all tests of the pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect
from tests.browser import open_browser
from tests.pages.page_visit import DashboardThread, Visit, profile
from tests.unit.dashboard.conftest import write_run

from telescope.testing.replay import Replay

NUM_STEPS = 12

expect.set_options(timeout=20_000)  # milliseconds; on a machine that does other work too

NAMES_OF_THIS_MACHINE = "--host-resolver-rules=MAP *.example 127.0.0.1"
"""No test asks the network for a name."""


@pytest.fixture(scope="package", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what the user keeps, instead of the real one."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium without a window. Without one the tests fail and say what to install."""
    with open_browser([NAMES_OF_THIS_MACHINE]) as opened:
        yield opened


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the replays `first` and `second`, and the small `resumed`, of two attempts, and `other`."""
    folder = tmp_path_factory.mktemp("pages")
    for name, recording in {"first": "demo", "second": "demo-lr-1e-3"}.items():
        with Replay(folder / name, recording, num_steps=NUM_STEPS) as replay:
            replay.write_all()
    write_run(folder / "resumed", "grpo", resumed=True)
    write_run(folder / "other", "rloo")
    return folder


@pytest.fixture(scope="package")
def dashboard(runs: Path) -> Iterator[DashboardThread]:
    """`telescope ui` over `runs`."""
    with DashboardThread(runs) as process:
        yield process


@pytest.fixture(scope="package")
def own_profile(browser: Browser) -> Iterator[BrowserContext]:
    """The profile of all `visitor`."""
    with profile(browser) as context:
        yield context


@pytest.fixture
def visitor(own_profile: BrowserContext, dashboard: DashboardThread) -> Iterator[Visit]:
    """A page. Errors in its console, exceptions and failed requests fail the test."""
    page = own_profile.new_page()
    opened = Visit(page, dashboard.address)
    yield opened
    page.close()
    assert opened.problems == []
