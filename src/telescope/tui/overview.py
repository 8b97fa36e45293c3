"""Draws the overview of a run for `telescope train` and for the first page of `telescope tui`.

`read_overview` collects the values with the functions of the dashboard's Overview, and `draw` renders them.
"""

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
from telescope.record.run_info import STATUS_WORDS
from telescope.tui.text import clock, number, safe
from telescope.utils.text import pluralize, single_line

SPARK_COLUMNS = 32
OTHER_COLUMNS = 68
"""Columns of the health table besides the sparkline."""
FIXED_LINES = 18
"""Number of lines besides health, activities and alerts, which share the rest of a terminal."""
NUM_RESOLVED = 8
"""Number of resolved alerts and notices that are shown."""
ATTENTION = "yellow"
MOST_DRAWN = 1e300
"""A curve leaves out values of at least this magnitude, so that its range stays finite."""
NEWEST = {
    "reward": rules.REWARD, "trained": rules.TRAINED_REWARD, "tokens/s": "performance/trained_tokens_per_second",
    "seconds": "timing_step_total",
}  # fmt: skip
"""Metrics of the newest step, by their shown names."""
COUNTS = {
    "open_groups": "groups open", "finished_groups": "ready", "discarded_groups": "discarded",
    "masked_samples": "masked", "long_prompts": "prompts too long",
}  # fmt: skip
"""Counts in `now.json` (without the prefix `num_`) and their shown names."""


def read_overview(registry: Registry, run_id: str) -> dict[str, Any]:
    """Returns health, curves, newest step, facts and current activity of a run."""
    store = registry.store(run_id)
    health = health_of(store)
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
    """Returns the overview, `width` columns wide. With `height`, long lists are cut to fit a terminal."""
    health, now, about = found["health"], found["now"], found["about"]
    most = None if height is None else max(2, (height - FIXED_LINES) // 3)
    first, *rest = health["verdict"] or [{"text": ""}]
    parts: list[RenderableType] = [
        safe(first["text"], "bold"),
        *([safe(" ".join(sentence["text"] for sentence in rest))] if rest else []),
        Text(),
        _progress(health["progress"], about["info"], now),
    ]
    if health["cells"] or found["evals"]:
        parts += [Text(), _health(found, width, most)]
    if (activities := _activities(found, most)).row_count:
        parts += [Text(), activities]
    return Group(*parts, Text(), *_alerts(health["alerts"], most, about["info"]["live"]), Text(), _facts(about))


def _progress(progress: dict[str, Any], run: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    words = STATUS_WORDS.get(run["status"], run["status"])
    phase = Text(single_line(now.get("phase")) or words, "green" if run["live"] else "bold")
    left = f"  {clock(progress['seconds_left'])} left" if progress["seconds_left"] is not None else ""
    step, total = progress["step"], progress["num_steps"]
    bar = BarColumn(None, complete_style="cyan", finished_style="cyan")
    bars = Progress("{task.description}", bar, "{task.fields[rest]}", expand=True)
    count = f"{step} of {total} steps" if total else f"{step} steps"
    bars.add_task(count, completed=step, total=total or 1, rest=f"{clock(run['duration'])} in{left}")
    done, of = now.get("eval_done") or 0, now.get("eval_total") or 0
    if done < of:
        bars.add_task("eval", completed=done, total=of, rest=f"{done} of {of} samples")
    return Group(phase, bars)


def _health(found: dict[str, Any], width: int, most: int | None) -> Table:
    """Returns a table with a row for each eval and health cell: newest value, curve and words."""
    columns = max(8, min(SPARK_COLUMNS, width - OTHER_COLUMNS))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    mean_of = f"last {pluralize(min(rules.WINDOW, found['health']['progress']['step']), 'step')}"
    for name, side in (("", "left"), (mean_of, "right"), ("", "left"), ("", "left"), ("", "left")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.columns[3].width = columns
    for name, points in found["evals"].items():
        newest, line = points[-1], curve([point.accuracy for point in points], columns) or ""
        metric = "" if newest.metric == "correct" else newest.metric
        table.add_row(Text(single_line(name), "bold"), newest.text, Text(metric, "dim"), line, newest.interval)
    cells = found["health"]["cells"]
    if most is not None:  # the reward first, then cells that need attention
        cells = sorted(cells, key=lambda cell: cell["name"] != "reward" and not cell["attention"])[:most]
    for cell in cells:
        style, mark = (ATTENTION, "! ") if cell["attention"] else ("", "")
        unit, percent = ("", " %") if cell["unit"] == "%" else (cell["unit"], "")
        table.add_row(
            Text(cell["title"], style or "bold"), Text(number(cell["latest"], 3) + percent, style), Text(unit, "dim"),
            curve(found["curves"][cell["name"]], columns) or "", Text(mark + cell["words"], style),
        )  # fmt: skip
    return table


def _activities(found: dict[str, Any], most: int | None) -> Table:
    """Returns the newest step and, for a live run, the rollouts in progress and the activity of each component."""
    now = found["now"] if found["about"]["info"]["live"] else {}
    table = Table.grid(Column(style="dim", no_wrap=True), "", padding=(0, 2))
    if found["step"] is not None:
        newest = " · ".join(f"{name} {number(value)}" for name, value in found["newest"].items())
        table.add_row(f"step {found['step']}", newest)
    if now.get("num_slots"):
        counts = [f"{value:,} {words}" for name, words in COUNTS.items() if (value := now.get(f"num_{name}"))]
        used = f"{now['num_generating']} of {now['num_slots']} slots"
        speed = f"{now['tokens_per_second']:,.0f} tokens/s"
        table.add_row("rollouts", " · ".join((used, *counts, speed)))
    components = sorted((now.get("components") or {}).items())
    for name, doing in components[:most]:
        table.add_row(single_line(name), Text(single_line(doing), no_wrap=True, overflow="ellipsis"))
    if most is not None and len(components) > most:
        table.add_row("…", f"and {len(components) - most} more")
    return table


def _alerts(alerts: list[dict[str, Any]], most: int | None, live: bool) -> list[RenderableType]:
    unresolved = [alert for alert in alerts if not alert["resolved"]]
    resolved = [alert for alert in alerts if alert["resolved"] and alert["level"] != "info"]
    notices = [alert for alert in alerts if alert["level"] == "info"]
    named = {"open": unresolved, "resolved": resolved} if live else {"closed": unresolved + resolved}
    named["notice" if len(notices) == 1 else "notices"] = notices
    counts = [f"{len(some)} {word}" for word, some in named.items() if some]
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
    if alert["step"] is None:
        return "" if alert["time"] is None else time.strftime("%H:%M:%S", time.localtime(alert["time"]))
    return f"steps {alert['first_step']} to {alert['step']}" if alert["count"] > 1 else f"step {alert['step']}"


def _facts(about: dict[str, Any]) -> Table:
    run, newest = about["info"], (about["attempts"] or [{}])[-1]
    facts = {
        "model": run["model"], "algorithm": run["algorithm"], "environments": ", ".join(run["environments"]),
        "machine": newest.get("host"), "code": (newest.get("git_commit") or "")[:7],
        "attempt": run["attempt"] if run["attempt"] > 1 else "", "error": run["error"],
    }  # fmt: skip
    table = Table.grid(Column(style="dim"), "", padding=(0, 2))
    for name, value in facts.items():
        if value:
            table.add_row(name, safe(str(value)))
    return table


def curve(values: Sequence[float], width: int, height: int = 1, color: str = "#5fd7e7") -> Sparkline[float] | None:
    """Returns a curve of means, with straight lines over missing values. None without finite values."""
    every = np.array(values, float)
    known = np.flatnonzero(np.abs(every) < MOST_DRAWN)
    if not len(known):
        return None
    line = np.interp(np.arange(len(every)), known, every[known])
    means = [float(part.mean()) for part in np.array_split(line, min(len(line), width))]
    shade = Color.parse(color)
    return Sparkline(means, width=len(means) if height == 1 else width, height=height, min_color=shade, max_color=shade)
