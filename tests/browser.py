"""Chromium and a dashboard in processes of their own, for tests, screenshots and benchmarks of the pages.

    python -m tests.browser     prints the path of Chromium, or what to install

Owns how the two are found, started and ended. Playwright drives the browser of the system, or the one that
`playwright install chromium` downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.errors import UserError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Commands of Chromium, by distribution."""

MISSING = (
    "no Chromium found: the tests of the pages in a browser need one. On Debian: make setup CHROMIUM=1 as root, "
    "or apt-get install chromium. Elsewhere: .venv/bin/playwright install chromium"
)

UNUSED_FEATURES = (
    # Pages of Chromium's own for what its address bar would show, two for each page: half a second of a core.
    "WebUIOmniboxPopup", "WebUIOmniboxAimPopup",
    # What Playwright switches off, whose list this one replaces.
    "AimEnabled", "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades",
    "HttpsFirstBalancedModeAutoEnable", "LensOverlay", "MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints",
    "PaintHolding", "PreconnectToSearch", "ThirdPartyStoragePartitioning",
)  # fmt: skip
END_SECONDS = 10.0
START_SECONDS = 300.0


def find_chromium() -> Path | None:
    """Returns the path of Chromium or Chrome, or None."""
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    downloads = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright").expanduser()
    return max(downloads.glob("chromium-*/chrome-linux*/chrome"), default=None)


@contextmanager
def open_browser(arguments: Sequence[str] = ()) -> Iterator[Browser]:
    """Starts Chromium without a window. Raises `UserError` without one."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        raise UserError(MISSING)
    # Chromium refuses its sandbox to root. The pages that are opened here are our own.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    features = f"--disable-features={','.join(UNUSED_FEATURES)}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*sandbox, features, *arguments])
        try:
            yield browser
        finally:
            browser.close()


class DashboardProcess:
    """`telescope ui` over some folders, on a free port of this machine. It can be ended and started again."""

    def __init__(self, *arguments: str | Path) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.address = ""

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server, on the port that it had before. Returns when it answers."""
        command = [sys.executable, "-m", "telescope", "ui", "--port", str(self.port)]
        if "--host" not in self._arguments:
            command.append("--no-token")  # of other users of a test machine
        command += self._arguments
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        printed = ""
        deadline = threading.Timer(START_SECONDS, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                printed += line
                if found := re.search(r"http://[^:]+:(\d+)[^\s#]*", line):  # over a single run, its page follows
                    self.address, self.port = found[0], int(found[1])
                    return
        finally:
            deadline.cancel()
        raise RuntimeError(f"`telescope ui` ended, or was ended after {START_SECONDS:.0f} s, without: {printed!r}")

    def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(END_SECONDS)

    def __enter__(self) -> DashboardProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    chromium = find_chromium()
    print(chromium or MISSING)
    sys.exit(chromium is None)
