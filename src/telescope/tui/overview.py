"""The first page: verdict, progress, health and alerts."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from telescope.cli.live_view import clock, sparkline
from telescope.dashboard.runs import health_of, run_info
from telescope.tui.page import Page
from telescope.tui.text import number, safe
from telescope.utils.text import single_line

SPARK_COLUMNS = 32
OTHER_COLUMNS = 62
"""Columns of the health table besides the sparkline."""
NUM_RESOLVED = 8
"""Resolved alerts and notices that are shown."""
ATTENTION = "yellow"


class OverviewPage(Page):
    """Whether the run is healthy, and how far it is."""

    TABLES: ClassVar[frozenset[str]] = frozenset({"steps", "alerts", "evals", "status", "attempts"})
    DEFAULT_CSS = "OverviewPage #about { padding: 0 1; }"

    def compose(self) -> ComposeResult:
        """Creates the text."""
        with VerticalScroll():
            yield Static(id="about")

    def focus_first(self) -> None:
        """Puts the cursor into the text, so that keys scroll it."""
        self.query_one(VerticalScroll).focus()

    def read(self) -> dict[str, Any]:
        """Returns health, lines and facts of the run."""
        health = health_of(self.view.registry, self.view.run_id)
        _, _, metrics = self.view.store.steps()
        names = {name for cell in health["cells"] for name in cell["metric"].split(" / ")}
        lines = {name: list(metrics[name]) for name in names if name in metrics}
        return {
            "health": health,
            "lines": lines,
            "info": run_info(self.view.registry, self.view.run_id),
        }

    def show(self, found: dict[str, Any]) -> None:
        """Draws the page."""
        self.query_one("#about", Static).update(draw(found, width=max(60, self.size.width - 4)))


def draw(found: dict[str, Any], width: int) -> RenderableType:
    """Returns the page, `width` columns wide."""
    health, run = found["health"], found["info"]["info"]
    first, *rest = health["verdict"] or [{"text": ""}]
    parts: list[RenderableType] = [
        Text(),
        safe(first["text"], "bold"),
        *([safe(" ".join(sentence["text"] for sentence in rest))] if rest else []),
        Text(),
        _progress(health["progress"], run, width),
        Text(),
        _cells(health["cells"], found["lines"], width),
        Text(),
        *_alerts(health["alerts"]),
        Text(),
        _facts(found["info"]),
    ]
    return Group(*parts)


def _progress(progress: dict[str, Any], run: dict[str, Any], width: int) -> RenderableType:
    total = progress["num_steps"]
    words = {"live": "training", "dead": "its process is gone"}.get(run["status"], run["status"])
    left = f"{clock(progress['seconds_left'])} left" if progress["seconds_left"] is not None else ""
    done = f"{progress['step']}{f' of {total}' if total else ''} steps"
    text = Text.assemble(
        (words, "green" if run["live"] else "bold"), f"  {done}",
        f"  {clock(run['duration'])} in  {left}",
    )  # fmt: skip
    return Group(
        text,
        ProgressBar(
            total=max(total or 1, 1),
            completed=progress["step"],
            width=min(width, 100),
            complete_style="cyan",
            finished_style="cyan",
        ),
    )


def _cells(cells: list[dict[str, Any]], lines: dict[str, list[float]], width: int) -> Table:
    spark = max(8, min(SPARK_COLUMNS, width - OTHER_COLUMNS))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, side in (("", "left"), ("last 10 steps", "right"), ("", "left"), ("", "left"), ("", "left")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for cell in cells:
        style = ATTENTION if cell["attention"] else ""
        is_share = cell["unit"] == "%"
        shown = number(cell["latest"], 3) + (" %" if is_share else "")
        table.add_row(
            Text(cell["title"], style or "bold"), Text(shown, style), Text("" if is_share else cell["unit"], "dim"),
            Text(sparkline(_values(cell["metric"], lines), spark), style or "cyan"),
            Text(("! " if cell["attention"] else "") + cell["words"], style),
        )  # fmt: skip
    return table


def _values(metric: str, lines: dict[str, list[float]]) -> list[float]:
    top, _, bottom = metric.partition(" / ")
    if not bottom:
        return lines.get(top, [])
    pairs = zip(lines.get(top, []), lines.get(bottom, []), strict=False)
    return [one / other if other else float("nan") for one, other in pairs]


def _alerts(alerts: list[dict[str, Any]]) -> list[RenderableType]:
    unresolved = [alert for alert in alerts if not alert["resolved"]]
    resolved = [alert for alert in alerts if alert["resolved"] and alert["level"] != "info"]
    notices = [alert for alert in alerts if alert["level"] == "info"]
    words = (
        (unresolved, "open"), (resolved, "resolved"), (notices, "notice" if len(notices) == 1 else "notices"),
    )  # fmt: skip
    counts = [f"{len(some)} {word}" for some, word in words if some]
    out: list[RenderableType] = [Text.assemble(("Alerts  ", "bold"), (", ".join(counts) or "none", "dim"))]
    for alert in unresolved:
        out.append(Text.assemble(("! ", ATTENTION), single_line(alert["title"]), (f"  {_moment(alert)}", "dim")))
        more = " ".join(filter(None, (alert["text"], alert["advice"])))
        if more:
            out.append(safe(f"  {single_line(more)}", "dim"))
    for alert in (*resolved, *notices)[:NUM_RESOLVED]:
        mark = "· " if alert["level"] == "info" else "✓ "
        out.append(
            Text(f"{mark}{single_line(alert['title'])}  {_moment(alert)}", "dim", no_wrap=True, overflow="ellipsis")
        )
    return out


def _moment(alert: dict[str, Any]) -> str:
    if alert["step"] is not None:
        since = f"steps {alert['first_step']} to " if alert["count"] > 1 else "step "
        return f"{since}{alert['step']}"
    return time.strftime("%H:%M:%S", time.localtime(alert["time"])) if alert["time"] is not None else ""


def _facts(info: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    run, newest = info["info"], (info["attempts"] or [{}])[-1]
    facts = {
        "model": run["model"], "algorithm": run["algorithm"], "environments": ", ".join(run["environments"]),
        "machine": newest.get("host"), "code": (newest.get("git_commit") or "")[:7],
        "attempt": str(run["attempt"]) if run["attempt"] > 1 else "", "error": run["error"],
    }  # fmt: skip
    for name, value in facts.items():
        if value:
            table.add_row(name, safe(str(value)))
    return table
