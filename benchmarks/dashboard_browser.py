"""Measures the pages of the dashboard in Chromium, for `benchmarks/dashboard.py`.

    from dashboard_browser import measure_pages

Times are those of the page's own clock, from the start of the navigation, or from an input to the frame that shows its
effect. Frames come every 16.7 ms.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page
from tests.browser import DashboardProcess, open_browser

from telescope.dashboard.tables import COMPRESS_SECONDS

PAGES = ("overview", "metrics", "rollouts", "timeline", "infra", "evals", "logs")
CALM_MS = 500
"""A page is complete when it waits for no answer and its document has not changed for so long."""

IDLE_SECONDS = 10.0
"""How long the processor time of the server is measured while a page of an ended run is open."""

SETTLE_SECONDS = COMPRESS_SECONDS + 7.0
"""Time for the server to compress its tables, which it starts COMPRESS_SECONDS after reading them."""

WHEEL_EVENTS = 60
WATCH = """
(() => {
  window.drawn = { content: 0, complete: 0, awaited: 0 };
  const changed = () => {
    window.drawn.complete = performance.now();
    if (!window.drawn.content && document.querySelector("main > *")) window.drawn.content = performance.now();
  };
  const all = { subtree: true, childList: true, characterData: true, attributes: true };
  new MutationObserver(changed).observe(document, all);
  const counted = (act) => async function (...given) {
    window.drawn.awaited += 1;
    try {
      return await act.apply(this, given);
    } finally {
      window.drawn.awaited -= 1;
    }
  };
  window.fetch = counted(window.fetch);
  Response.prototype.json = counted(Response.prototype.json);
  // A message posted in an animation frame arrives after that frame is drawn.
  window.frame = () => new Promise((done) => requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(null);
  }));
  window.timed = async (act, shown) => {
    const begin = performance.now();
    act();
    do await window.frame(); while (!shown());
    return performance.now() - begin;
  };
  window.frames = [];
  window.count = (last) => requestAnimationFrame((now) => {
    if (last) window.frames.push(now - last);
    window.count(now);
  });
})();
"""

TYPE = """
const type = (label, text) => {
  const field = document.querySelector(`[aria-label="${label}"]`);
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, text);
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
"""

FACET = """() => {
  const total = () => document.querySelector(".facets .total > span").textContent;
  const before = total();
  const listed = () => document.querySelectorAll(".gl [role=option]").length > 0;
  const facets = [...document.querySelectorAll(".facets [role=checkbox]")];
  const facet = facets.find((one) => one.textContent.startsWith("%s"));
  return window.timed(() => facet.click(), () => total() !== before && listed());
}"""

METRIC = f"""() => {{
  {TYPE}
  const rows = () => document.querySelectorAll(".tree [title]").length;
  const before = rows();
  return window.timed(() => type("Filter metrics", "entropy"), () => rows() !== before);
}}"""

ONE_CHART = "charts=One:rollouts/tokens_completion/mean"
"""A chart with percentiles, which is the slowest kind."""

REDRAW = """() => {
  const button = [...document.querySelectorAll("button")].find((one) => one.textContent === "Log");
  return window.timed(() => button.click(), () => true);
}"""


def measure_pages(run_dir: Path, repeats: int) -> dict[str, Any]:
    """Returns milliseconds of first paints, filters, charts and frames, and the server's memory and idle load."""
    name = run_dir.name
    with open_browser() as browser:
        pages = []
        for page in ("runs", *PAGES):
            place = f"{name}/{page}" if page != "runs" else ""
            with DashboardProcess(run_dir) as dashboard:
                cold = first_paint(browser, f"{dashboard.address}#/{place}")
                warm = [first_paint(browser, f"{dashboard.address}#/{place}") for _ in range(repeats)]
            content, complete = (statistics.median(times) for times in zip(*warm, strict=True))
            cold_times = {"cold_content_ms": cold[0], "cold_complete_ms": cold[1]}
            pages.append({"page": page, **cold_times, "content_ms": content, "complete_ms": complete})
        with DashboardProcess(run_dir) as dashboard:
            run = f"{dashboard.address}#/{name}"
            inputs = {
                "filter answers": [timed(browser, f"{run}/rollouts?list=answers", FACET % "discarded")],
                "filter metrics": [timed(browser, f"{run}/metrics", METRIC)],
                "redraw all charts": [timed(browser, f"{run}/metrics", REDRAW) for _ in range(repeats)],
                "redraw one chart": [timed(browser, f"{run}/metrics?{ONE_CHART}", REDRAW) for _ in range(repeats)],
            }
            inputs["filter answers"] += [
                timed(browser, f"{run}/rollouts?list=answers", FACET % "discarded") for _ in range(repeats)
            ]
            frames = timeline_frames(browser, f"{run}/timeline")
            idle = idle_share(browser, f"{run}/overview", dashboard.pid)
            memory = psutil.Process(dashboard.pid).memory_info().rss / 2**20
    return {
        "pages": pages,
        "inputs": [
            {"input": name, "median_ms": statistics.median(times), "largest_ms": max(times)}
            for name, times in inputs.items()
        ],
        "timeline_frames": frames,
        "server_mib": memory,
        "idle_server_percent_of_a_core": 100 * idle,
    }


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """Yields a page in a profile without a cache, when it is complete."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(WATCH)
    page = context.new_page()
    try:
        page.goto(address)
        calm = f"content > 0 && awaited === 0 && performance.now() - complete > {CALM_MS}"
        page.wait_for_function(f"() => {{ const {{ content, complete, awaited }} = window.drawn; return {calm}; }}")
        yield page
    finally:
        context.close()


def first_paint(browser: Browser, address: str) -> tuple[float, float]:
    """Returns when the page had content, and when it was complete, in milliseconds."""
    with opened(browser, address) as page:
        drawn = page.evaluate("() => window.drawn")
        return drawn["content"], drawn["complete"]


def timed(browser: Browser, address: str, script: str) -> float:
    """Returns the milliseconds of one input on a new page."""
    with opened(browser, address) as page:
        return float(page.evaluate(script))


def timeline_frames(browser: Browser, address: str) -> dict[str, float]:
    """Returns the milliseconds of frames while the whole run is zoomed into, and out of again."""
    with opened(browser, address) as page:
        page.keyboard.press("0")
        page.wait_for_timeout(CALM_MS)
        box = page.locator(".tlc canvas").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 200)
        page.evaluate("() => window.count()")
        for number in range(WHEEL_EVENTS):
            page.mouse.wheel(0, -60 if number < WHEEL_EVENTS / 2 else 60)
        frames = sorted(page.evaluate("() => window.frames"))
        share = len(frames) / 100
        return {
            "frames": len(frames),
            "median_ms": frames[int(50 * share)],
            "p95_ms": frames[int(95 * share)],
            "largest_ms": frames[-1],
        }


def idle_share(browser: Browser, address: str, pid: int) -> float:
    """Returns the share of one core that the server uses while a page is open."""
    server = psutil.Process(pid)
    with opened(browser, address) as page:
        page.wait_for_timeout(1000 * SETTLE_SECONDS)
        before = server.cpu_times()
        page.wait_for_timeout(1000 * IDLE_SECONDS)
        after = server.cpu_times()
    return (after.user + after.system - before.user - before.system) / IDLE_SECONDS
