"""Chromium and a dashboard in processes of their own, for tests, screenshots and benchmarks of the pages.

    python -m telescope.testing.browser     prints the path of Chromium, or what to install

Owns how the two are found, started and ended. Playwright drives the browser of the system, or the one that
`playwright install chromium` downloaded.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import sys
import time
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

START_SECONDS = 300.0
"""How long the server may take until it prints its address; it takes 2 seconds on an idle machine."""

END_SECONDS = 10.0


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
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*sandbox, *arguments])
        try:
            yield browser
        finally:
            browser.close()


class DashboardProcess:
    """`telescope ui` over some folders, on a free port of this machine. It can be ended and started again."""

    def __init__(self, *arguments: str | Path) -> None:
        self._arguments = [str(argument) for argument in arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.address = ""

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server, on the port that it had before. Returns when it answers."""
        command = [sys.executable, "-m", "telescope.cli.main", "ui", "--port", str(self.port)]
        if "--host" not in self._arguments:
            command.append("--no-token")  # of other users of a test machine
        command += self._arguments
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.address = _read_address(self._process).partition("#")[0]  # over a single run, its page follows
        self.port = int(self.address.split("?")[0].rstrip("/").rpartition(":")[2])

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


def _read_address(process: subprocess.Popen[bytes]) -> str:
    """Returns the address that the server prints."""
    assert process.stdout is not None
    printed = b""
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 4096)
            printed += piece
            if found := re.search(rb"http://\S+(?=\n)", printed):
                return found[0].decode()
            if not piece:
                break
    process.kill()
    raise RuntimeError(f"`telescope ui` printed no address within {START_SECONDS:.0f} s: {printed.decode()!r}")


if __name__ == "__main__":
    chromium = find_chromium()
    print(chromium or MISSING)
    sys.exit(chromium is None)
