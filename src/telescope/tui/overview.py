"""The overview of a run: what `telescope train` shows while it trains, and the first page of `telescope tui`.

`read_overview` collects what is shown, with the functions of the dashboard's Overview, and `draw` renders it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.color import Color
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress
from rich.table import Column, Table
from rich.text import Text
from textual.renderables.sparkline import Sparkline

from telescope.dashboard.registry import Registry
from telescope.dashboard.runs import eval_points, health_of, run_info
from telescope.health import rules
from telescope.health.rules import EvalPoint
from telescope.tui.text import clock, number, safe
from telescope.utils.text import single_line

SPARK_COLUMNS = 32
OTHER_COLUMNS = 68
"""Columns of the health table besides the sparkline."""
SPARK_COLORS = (Color.parse("#3a8f9a"), Color.parse("#5fd7e7"))
MOST_DRAWN = 1e300
"""Magnitude from which a sparkline leaves a value out, so that the range of all stays finite."""
FIXED_LINES = 12
"""Lines besides health, activities and alerts, which share the rest of a terminal."""
NUM_RESOLVED = 8
"""Resolved alerts and notices that are shown."""
ATTENTION = "yellow"
NEWEST = {
    "reward": rules.REWARD, "trained": rules.TRAINED_REWARD, "tokens/s": "performance/trained_tokens_per_second",
    "seconds": "timing_step_total",
}  # fmt: skip
"""Metrics of the newest step that are named with it."""
COUNTS = {
    "open_groups": "groups open", "finished_groups": "ready", "discarded_groups": "discarded",
    "masked_samples": "masked", "long_prompts": "prompts too long",
}  # fmt: skip
"""Counts of the rollouts in `now.json`, after `num_`."""


def read_overview(registry: Registry, run_id: str) -> dict[str, Any]:
    """Returns health, curves, newest step, facts and current activity of a run."""
    store = registry.store(run_id)
    health = health_of(registry, run_id)
    _, columns, metrics = store.steps()
    curves = {}
    with np.errstate(all="ignore"):
        for name, (top, _, bottom) in ((cell["name"], cell["metric"].partition(" / ")) for cell in health["cells"]):
            curves[name] = np.divide(metrics[top], metrics[bottom] if bottom else 1.0)
    evals: dict[str, list[EvalPoint]] = {}
    for point in eval_points(store):
        evals.setdefault(point.name, []).append(point)
    newest = {name: metrics[metric][-1] for name, metric in NEWEST.items() if columns["step"] and metric in metrics}
    return {
        "health": health, "curves": curves, "evals": evals, "step": (columns["step"] or [None])[-1], "newest": newest,
        "about": run_info(registry, run_id), "now": store.run.now() or {},
    }  # fmt: skip


def draw(found: dict[str, Any], width: int, height: int | None = None) -> RenderableType:
    """Returns the overview, `width` columns wide. With `height`, lists are cut so that a terminal shows the start."""
    health, now, about = found["health"], found["now"], found["about"]
    most = None if height is None else max(3, (height - FIXED_LINES) // 3)
    first, *rest = health["verdict"] or [{"text": ""}]
    parts: list[RenderableType] = [
        safe(first["text"], "bold"),
        *([safe(" ".join(sentence["text"] for sentence in rest))] if rest else []),
        Text(),
        _progress(health["progress"], about["info"], now),
    ]
    if health["cells"] or found["evals"]:
        parts += [Text(), _health(found, width, most)]
    if activities := _activities(found, most):
        parts += [Text(), activities]
    return Group(*parts, Text(), *_alerts(health["alerts"], most), Text(), _facts(about))


def _progress(progress: dict[str, Any], run: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    words = {"live": "training", "dead": "its process is gone"}.get(run["status"], run["status"])
    duration = time.time() - run["started_at"] if run["live"] and run["started_at"] else run["duration"]
    left = f"  {clock(progress['seconds_left'])} left" if progress["seconds_left"] is not None else ""
    total = progress["num_steps"]
    bars = Progress(
        "{task.description}", BarColumn(None, complete_style="cyan", finished_style="cyan"), "{task.fields[rest]}",
        expand=True,
    )  # fmt: skip
    count = f"{progress['step']}{f' of {total}' if total else ''} steps"
    bars.add_task(count, completed=progress["step"], total=total or 1, rest=f"{clock(duration)} in{left}")
    done, of = now.get("eval_done") or 0, now.get("eval_total") or 0
    if done < of:
        bars.add_task("eval", completed=done, total=of, rest=f"{done} of {of} samples")
    phase = Text(single_line(now.get("phase")) or words, "green" if run["live"] else "bold", no_wrap=True)
    phase.overflow = "ellipsis"
    return Group(phase, bars)


def _health(found: dict[str, Any], width: int, most: int | None) -> Table:
    columns = max(8, min(SPARK_COLUMNS, width - OTHER_COLUMNS))
    table = Table(
        Column(no_wrap=True), Column("last 10 steps", justify="right", no_wrap=True), Column(no_wrap=True),
        Column(width=columns), Column(no_wrap=True), box=None, padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip

    def add(title: str, latest: str, unit: str, values: Sequence[float], words: str, attention: bool = False) -> None:
        style = ATTENTION if attention else ""
        known = [value for value in values if abs(value) < MOST_DRAWN]
        means = [part.mean() for part in np.array_split(known, min(len(known), columns) or 1)]
        low, high = SPARK_COLORS
        spark = Sparkline(means, width=len(means), min_color=low, max_color=high)
        table.add_row(
            Text(title, style or "bold"), Text(latest, style), Text(unit, "dim"), spark if len(known) > 1 else "",
            Text(("! " if attention else "") + words, style),
        )  # fmt: skip

    for name, points in found["evals"].items():
        low, high = points[-1].low, points[-1].high
        between = f"{100 * low:.1f} to {100 * high:.1f}" if low is not None and high is not None else ""
        values = [point.accuracy for point in points]
        add(single_line(name), f"{100 * values[-1]:.1f} %", "", values, between)
    cells = found["health"]["cells"]
    if most is not None:  # the reward, then what needs attention
        cells = sorted(cells, key=lambda cell: cell["name"] != "reward" and not cell["attention"])[:most]
    for cell in cells:
        is_share = cell["unit"] == "%"
        latest = number(cell["latest"], 3) + (" %" if is_share else "")
        curve = found["curves"][cell["name"]]
        add(cell["title"], latest, "" if is_share else cell["unit"], curve, cell["words"], cell["attention"])
    return table


def _activities(found: dict[str, Any], most: int | None) -> Table | None:
    """Returns the newest step, the rollouts in progress and what each component does. None before the first of them."""
    now = found["now"]
    rows: dict[str, str] = {}
    if found["step"] is not None:
        rows[f"step {found['step']}"] = " · ".join(f"{name} {number(value)}" for name, value in found["newest"].items())
    if now.get("num_slots"):
        shown = [f"{value:,} {words}" for name, words in COUNTS.items() if (value := now.get(f"num_{name}"))]
        used = f"{now['num_generating']} of {now['num_slots']} slots"
        rows["rollouts"] = " · ".join((used, *shown, f"{now['tokens_per_second']:,.0f} tokens/s"))
    components = sorted((now.get("components") or {}).items())
    shown_components = components[:most]
    rows |= {single_line(name): single_line(doing) for name, doing in shown_components}
    if more := len(components) - len(shown_components):
        rows["…"] = f"and {more} more"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for name, doing in rows.items():
        table.add_row(name, Text(doing))
    return table if rows else None


def _alerts(alerts: list[dict[str, Any]], most: int | None) -> list[RenderableType]:
    unresolved = [alert for alert in alerts if not alert["resolved"]]
    resolved = [alert for alert in alerts if alert["resolved"] and alert["level"] != "info"]
    notices = [alert for alert in alerts if alert["level"] == "info"]
    named = ((unresolved, "open"), (resolved, "resolved"), (notices, "notice" if len(notices) == 1 else "notices"))
    counts = [f"{len(some)} {word}" for some, word in named if some]
    out: list[RenderableType] = [Text.assemble(("Alerts  ", "bold"), (", ".join(counts) or "none", "dim"))]
    for alert in unresolved:
        out.append(Text.assemble(("! ", ATTENTION), single_line(alert["title"]), (f"  {_moment(alert)}", "dim")))
        if more := " ".join(filter(None, (alert["text"], alert["advice"]))):
            out.append(safe(f"  {single_line(more)}", "dim"))
    for alert in (*resolved, *notices)[: most or NUM_RESOLVED]:
        words = f"{'·' if alert['level'] == 'info' else '✓'} {single_line(alert['title'])}  {_moment(alert)}"
        out.append(Text(words, "dim", no_wrap=True, overflow="ellipsis"))
    return out


def _moment(alert: dict[str, Any]) -> str:
    if alert["step"] is not None:
        since = f"steps {alert['first_step']} to " if alert["count"] > 1 else "step "
        return f"{since}{alert['step']}"
    return time.strftime("%H:%M:%S", time.localtime(alert["time"])) if alert["time"] is not None else ""


def _facts(about: dict[str, Any]) -> Table:
    run, newest = about["info"], (about["attempts"] or [{}])[-1]
    facts = {
        "model": run["model"], "algorithm": run["algorithm"], "environments": ", ".join(run["environments"]),
        "machine": newest.get("host"), "code": (newest.get("git_commit") or "")[:7],
        "attempt": run["attempt"] if run["attempt"] > 1 else "", "error": run["error"],
    }  # fmt: skip
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in facts.items():
        if value:
            table.add_row(name, safe(str(value)))
    return table
