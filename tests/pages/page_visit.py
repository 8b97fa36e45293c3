"""A page of the dashboard as a test opens it: address, what went wrong, and when it has settled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response

from telescope.cli.ui import CLOSE_SECONDS, listen
from telescope.dashboard.app import create_app
from telescope.record.reader import Run

PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "runs": ("", {}),
    **{
        name: (f"first/{name}", {})
        for name in ("overview", "metrics", "rollouts", "timeline", "infra", "evals", "logs")
    },
    "compare": ("first/compare", {"with": "second"}),
    "changes": ("first/changes", {"step": "6", "metric": "rollouts/tokens_completion/mean"}),
    "code": ("resumed/code", {"against": "other"}),
}
"""Every page, with the parameters that fill it."""

SETTLED = """
(() => {
  let pending = 0, last = performance.now();
  const touched = () => { last = performance.now(); };
  const real = window.fetch;
  window.fetch = (...given) => {
    pending += 1;
    touched();
    return real(...given).finally(() => { pending -= 1; touched(); });
  };
  // A page that waits for a moment, until typing or zooming has ended, has not settled either.
  const SHORT_MS = 250;  // the longest wait before the address follows
  const timers = new Set(), [set, clear] = [window.setTimeout, window.clearTimeout];
  window.setTimeout = (run, after = 0, ...given) => {
    const timer = set(() => {
      if (timers.delete(timer)) touched();
      run(...given);
    }, after);
    if (after <= SHORT_MS) timers.add(timer);
    return timer;
  };
  window.clearTimeout = (timer) => {
    timers.delete(timer);
    clear(timer);
  };
  const all = { subtree: true, childList: true, characterData: true, attributes: true };
  new MutationObserver(touched).observe(document, all);
  const drawn = () => document.querySelector("main > *") !== null;
  window.hasSettled = () => pending === 0 && timers.size === 0 && drawn() && performance.now() - last > 100;
})();
"""
"""Runs before the page's own scripts. Settled: no request, no short timer, and no change of the document for
100 ms."""


TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""After them, elements know of a new size of the window."""


DOCUMENTS = "/api/user/"
"""Where another page may have written first: the page then reads the document and writes it again."""


class DashboardThread:
    """What `telescope ui` serves over a folder, from a thread: a process would import everything again."""

    def __init__(self, folder: Path) -> None:
        self._listener, _ = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.address = f"http://localhost:{self.port}/"
        app = create_app([folder], hosts=["127.0.0.1"])
        config = uvicorn.Config(
            app, log_config=None, log_level="error", lifespan="off", timeout_graceful_shutdown=CLOSE_SECONDS
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> DashboardThread:
        self._thread.start()  # requests wait in the listener until it runs
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._listener.close()


class Visit:
    """One browser page over the dashboard, and everything that went wrong on it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address.rstrip("/")
        self.problems: list[str] = []
        self.requested: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("requestfailed", self._failed)
        page.on("response", self._response)

    def open(self, place: str, params: Mapping[str, Any] | None = None) -> Page:
        """Opens a page by its place, `first/metrics`, loading everything anew. Returns it when it has settled."""
        query = f"?{urlencode(params)}" if params else ""
        if self.page.url != "about:blank":
            self.page.goto("about:blank")
        self.page.goto(f"{self.address}/#/{place}{query}")
        return self.settle()

    def settle(self) -> Page:
        """Waits until nothing changes any more."""
        self.page.evaluate(TWO_FRAMES)
        self.page.wait_for_function("() => window.hasSettled()")
        return self.page

    def _console(self, message: ConsoleMessage) -> None:
        conflict = "409 (Conflict)" in message.text and DOCUMENTS in message.location["url"]
        if message.type in ("error", "warning") and not conflict:
            self.problems.append(f"console {message.type}: {message.text}")

    def _failed(self, request: Request) -> None:
        # Requests that a page gave up itself: what was typed changed, or another address was opened.
        if request.failure != "net::ERR_ABORTED":
            self.problems.append(f"{request.failure}: {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400 and not (response.status == 409 and DOCUMENTS in response.url):
            self.problems.append(f"{response.status}: {response.url}")


@contextmanager
def profile(browser: Browser, **settings: Any) -> Iterator[BrowserContext]:
    """Yields a profile: its pages share files that they have read. `settings` are those of `Browser.new_context`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **settings})
    context.add_init_script(SETTLED)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def visit(browser: Browser, address: str, **settings: Any) -> Iterator[Visit]:
    """Yields a page in a profile of its own."""
    with profile(browser, **settings) as context:
        yield Visit(context.new_page(), address)


def groups_of(runs: Path, step: int) -> list[int]:
    """The groups of a step, in their order."""
    found = Run(runs / "first").sql(f"select group_id from groups where step = {step} order by group_id")
    return [row["group_id"] for row in found.to_dicts()]
