"""The canvas of the timeline: what is drawn has the shares of what was recorded, and says what became of a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.pages.page_visit import DashboardThread, Visit, visit

from telescope.record.reader import Run

Lane = tuple[str, int, int]
"""Area, server or rank, and slot."""

RECTANGLES = """
(() => {
  const real = CanvasRenderingContext2D.prototype.fillRect;
  window.frame = [];
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
    if (this.canvas.closest(".tlc")) {
      if (x === 0 && y === 0 && height > 100) window.frame = [];
      const fill = this.fillStyle instanceof CanvasPattern ? "pattern" : this.fillStyle;
      window.frame.push([fill, this.globalAlpha, x, y, width, height]);
    }
    return real.call(this, x, y, width, height);
  };
})();
"""
"""Keeps the rectangles of the last frame: color, opacity and place."""

TOKENS = {
    **{"queue": "q", "prefill": "pf", "decode": "dc", "environment": "env", "reward": "rw", "request": "line2"},
    **{"forward": "fw", "backward": "bw", "optimizer": "opt", "checkpoint": "ink3", "weight sync": "sync"},
    **{"wait": "wait"},
}
SLOT_KINDS = ("queue", "prefill", "decode", "environment", "reward", "request")

KIND_OF = {
    **{name: name for name in ("queue", "prefill", "decode", "environment", "reward", "backward", "optimizer")},
    **{"tool": "environment", "generate": "request", "checkpoint": "checkpoint", "weight_sync": "weight sync"},
    **dict.fromkeys(("forward", "compute_entropy", "loss_computation", "compute_kl"), "forward"),
    **{"gradient_norm": "optimizer", "waiting_for_data": "wait"},
}
BESIDE = ("step", "gradient_reduction", "weight_broadcast")
"""Spans of the trainer that are not drawn in its lane, or beside others."""

LEVELS = {"environment": 1, "reward": 2, "request": 3}
"""What a slot shows of spans at one time: the engine's first, then these."""

TALL = {"width": 1280, "height": 1200}
"""A window in which each slot has several pixels."""

PIXELS = 2.0
"""How far a share may be off, in pixels: one, and a half at each edge of a view."""


def recorded(record: Run, low: float, high: float) -> Mapping[Lane, Mapping[str, float]]:
    """Returns the seconds of each kind that each lane has in a range of time."""
    rows = record.sql(
        "SELECT component, name, rank, server, try_cast(attributes['lane'] AS BIGINT) AS lane, start, \"end\" "
        f'FROM spans WHERE "end" > {low!r} AND start < {high!r} ORDER BY start'
    ).to_dicts()
    lanes: dict[Lane, list[tuple[int, str, float, float]]] = defaultdict(list)
    for row in rows:
        kind = KIND_OF.get(row["name"])
        start, end = max(row["start"], low), min(row["end"], high)
        if row["component"] in ("inference", "rollout"):
            lane = ("engine", row["server"] or 0, row["lane"] or 0)
        elif row["component"] == "trainer" and not row["name"].startswith(BESIDE):
            lane = ("waits" if kind == "wait" else "trainer", row["rank"], 0)
            kind = kind or "request"  # what has no color of its own
        else:
            continue
        assert kind is not None, row["name"]
        lanes[lane].append((LEVELS.get(kind, 0), kind, start, end))
    found: dict[Lane, dict[str, float]] = {}
    for lane, spans in lanes.items():
        ordered = sorted(spans, key=lambda span: span[0])
        cuts = np.unique([time for *_, start, end in ordered for time in (start, end)])
        owner = np.full(len(cuts) - 1, -1)
        for place, (_, _, start, end) in enumerate(ordered):
            inside = slice(np.searchsorted(cuts, start), np.searchsorted(cuts, end))
            owner[inside] = np.where(owner[inside] < 0, place, owner[inside])
        seconds: dict[str, float] = defaultdict(float)
        for place, length in zip(owner, np.diff(cuts), strict=True):
            if place >= 0:
                seconds[ordered[place][1]] += length
        found[lane] = seconds
    return found


def rectangles(page: Page) -> dict[tuple[str, float], list[tuple[float, float]]]:
    """Returns the rectangles of lanes in the last frame: their edges, by kind and height on the page."""
    style = "getComputedStyle(document.documentElement)"
    colors = {
        page.evaluate(f"() => {style}.getPropertyValue('--{token}').trim()"): kind for kind, token in TOKENS.items()
    }
    found = defaultdict(list)
    for color, opacity, x, y, width, height in page.evaluate("() => window.frame"):
        if opacity == 1 and color in colors and height > 4:
            found[colors[color], y].append((x, x + width))
    return found


def heights_of_lanes(page: Page, lanes: list[Lane]) -> dict[Lane, float]:
    """Returns where each lane is drawn, in a view in which all have something."""
    seen = rectangles(page)
    slots = sorted({y for kind, y in seen if kind in SLOT_KINDS and y > 50})
    ranks = sorted({y for kind, y in seen if kind in ("forward", "backward")})
    slots = [y for y in slots if y < ranks[0]]
    placed = {"engine": slots, "trainer": ranks, "waits": ranks}
    return {
        lane: y
        for area, found in placed.items()
        for lane, y in zip(sorted(lane for lane in lanes if lane[0] == area), found, strict=True)
    }


def opened(visitor: Visit, params: Mapping[str, Any]) -> Page:
    visitor.page.set_viewport_size(TALL)
    page = visitor.open("first/timeline", {"path": 0, **params})
    expect(page.get_by_label("Colors")).to_be_visible()
    page.wait_for_function("() => window.frame.length > 200")
    return visitor.settle()


@pytest.mark.parametrize("limit", [40_000, 6000], ids=["every span", "merged spans"])
def test_drawn_shares_are_the_recorded_ones_at_every_zoom(visitor: Visit, runs: Path, limit: int):
    record = Run(runs / "first")
    origin = record.info.started_at
    parts: list[float] = []

    def fewer(route: Route) -> None:
        address = urlsplit(route.request.url)
        query = urlencode({**dict(parse_qsl(address.query)), "limit": limit})
        answer = route.fetch(url=address._replace(query=query).geturl())
        parts.append(answer.json()["part_seconds"])
        route.fulfill(response=answer)

    visitor.page.add_init_script(RECTANGLES)
    visitor.page.route("**/spans?*", fewer)
    (times,) = record.sql('SELECT min(start) AS low, max("end") AS high FROM spans').to_dicts()
    low, high = times["low"] - 1, times["high"] + 1
    heights: dict[Lane, float] = {}
    middle = (low + high) / 2
    for share in (1.0, 0.4, 0.1):
        begin, end = middle - share * (high - low) / 2, middle + share * (high - low) / 2
        page = opened(visitor, {"t": f"{begin - origin:.4f}-{end - origin:.4f}"})
        begin, end = (origin + float(time) for time in page.url.split("t=")[1].split("&")[0].split("-"))
        expected = recorded(record, begin, end)
        heights = heights or heights_of_lanes(page, list(expected))
        drawn = rectangles(page)
        canvas = page.locator(".tlc canvas").bounding_box()
        pixel = (end - begin) / (canvas["width"] - 148 - 16)
        assert (parts[-1] > 0) == (limit < 40_000 and share > 0.2), "spans were merged as the test means"
        # Within a view, spans that were merged may lie on the other side of its edge.
        allowed = PIXELS * pixel + (parts[-1] if share < 1 else 0)
        for lane, y in heights.items():
            kinds = [kind for kind in TOKENS if (kind == "wait") == (lane[0] == "waits")]
            edges = sorted(edge for kind in kinds for edge in drawn.get((kind, y), []))
            assert all(after[0] >= before[1] for before, after in pairwise(edges)), lane
            for kind in kinds:
                # A long span of these lies under merged ones, which may have moved within their part.
                under = 2 if parts[-1] > 0 and kind in LEVELS else 1
                seconds = pixel * sum(right - left for left, right in drawn.get((kind, y), []))
                recorded_seconds = expected.get(lane, {}).get(kind, 0.0)
                assert seconds == pytest.approx(recorded_seconds, abs=under * allowed), (share, lane, kind)


def test_outcomes_differ_without_color_and_can_be_left_out(visitor: Visit):
    visitor.page.add_init_script(RECTANGLES)
    page = opened(visitor, {"step": 5})

    def patterns() -> int:
        return page.evaluate("() => window.frame.filter(([fill]) => fill === 'pattern').length")

    assert patterns() > 0
    group = page.get_by_role("group", name="Requests that are shown")
    for name in ("discarded", "cancelled", "eval"):
        group.get_by_role("button", name=name).click()
    page.wait_for_url("**hide=discarded,cancelled,eval**")
    visitor.settle()
    assert patterns() == 0
    page.reload()
    expect(group.get_by_role("button", name="discarded")).to_have_attribute("aria-pressed", "false")


def test_the_panel_has_the_mean_path_of_the_steps_in_view(visitor: Visit, runs: Path):
    page = visitor.open("first/timeline", {"step": 5})
    panel = page.get_by_label("Step and request")
    expect(panel).to_contain_text("Step 5")
    page.keyboard.press("0")
    expect(panel).to_contain_text("Mean of steps 0 to 11")
    visitor.settle()
    (row,) = Run(runs / "first").sql("SELECT avg(ended_at - started_at) AS seconds FROM steps").to_dicts()
    *cells, whole = (float(text) for text in panel.locator("table.cp td:last-child").all_inner_texts())
    assert whole == pytest.approx(row["seconds"], abs=0.006)
    assert sum(cells) == pytest.approx(whole, abs=0.01 * len(cells))
    panel.get_by_role("button", name="Show step 5 alone").click()
    expect(panel.get_by_role("heading").first).to_contain_text("Step 5")


TEXTS = """
(() => {
  const { fillRect, fillText } = CanvasRenderingContext2D.prototype;
  window.texts = [];
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
    if (this.canvas.closest(".tlc") && x === 0 && y === 0 && height > 100) window.texts = [];
    return fillRect.call(this, x, y, width, height);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    if (this.canvas.closest(".tlc")) window.texts.push(text);
    return fillText.call(this, text, x, y);
  };
})();
"""
"""Keeps the texts of the last frame."""


def test_gauges_stay_while_those_of_another_time_are_read(visitor: Visit):
    visitor.page.add_init_script(TEXTS)
    page = visitor.open("first/timeline", {"step": 5})
    page.wait_for_function("() => window.texts.includes('CPU')")
    held: list[Route] = []
    page.route("**/gauges?*start=*", lambda route: held.append(route))
    with page.expect_request("**/gauges?*start=*"):
        page.keyboard.press("0")
    page.wait_for_timeout(100)
    assert "CPU" in page.evaluate("window.texts")
    for route in held:
        route.continue_()
    visitor.settle()


def test_a_critical_path_that_could_not_be_read_is_read_again(browser: Browser, dashboard: DashboardThread):
    with visit(browser, dashboard.address) as opened:
        opened.page.route("**/paths?*", lambda route: route.fulfill(status=503, body="{}"), times=1)
        panel = opened.open("first/timeline", {"step": 5}).get_by_label("Step and request")
        expect(panel).to_contain_text("Critical path")
        assert [problem for problem in opened.problems if "503" in problem]


def test_the_canvas_says_that_its_spans_are_read(visitor: Visit):
    held: list[Route] | None = []

    def hold(route: Route) -> None:
        if held is None:
            route.continue_()
        else:
            held.append(route)

    visitor.page.route("**/spans?*", hold)
    visitor.page.goto(f"{visitor.address}/#/first/timeline")
    status = visitor.page.get_by_label("Timeline", exact=True).get_by_role("status")
    expect(status).to_have_text("Reading the spans of this time.")
    waiting, held = held, None
    for route in waiting:
        route.continue_()
    expect(status).to_have_count(0)


@pytest.mark.parametrize("width", [800, 1440])
def test_the_panel_lies_beside_the_canvas_or_below_it(visitor: Visit, width: int):
    visitor.page.set_viewport_size({"width": width, "height": 900})
    page = visitor.open("first/timeline", {"step": 5})
    boxes = [page.locator(one).bounding_box() for one in (".tlc", ".p3", ".tl .tools")]
    canvas, panel, tools = (box for box in boxes if box is not None)
    if width == 800:
        assert panel["y"] >= canvas["y"] + canvas["height"]
    else:
        assert panel["x"] >= canvas["x"] + canvas["width"]
        assert tools["height"] <= 42
