"""Describes the state of a run for pages and terminals: verdict, health strip, progress and recorded alerts."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telescope.health import rules
from telescope.health.rules import WINDOW, Finding, History, Values, ends_of, finite
from telescope.health.watch import DISK_SILENT_SECONDS, SILENT_STEPS


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of the health strip: name, title, metric (`a / b` is a ratio) and unit."""

    name: str
    title: str
    metric: str
    unit: str


CELLS = (
    Cell("reward", "Reward", rules.REWARD, ""),
    Cell("wait", "Trainer waits", rules.WAIT, "%"),
    Cell("idle", "Engines idle", rules.IDLE, "%"),
    Cell("entropy", "Entropy", rules.ENTROPY, "nats"),
    Cell("kl", "KL to engine", rules.KL, "nats"),
    Cell("grad_norm", "Grad norm", rules.GRAD_NORM, ""),
    Cell("length", "Length", rules.LENGTH, "tokens"),
    Cell("truncated", "Truncated", rules.TRUNCATED, "%"),
    Cell("no_signal", "Zero advantage", rules.NO_SIGNAL, "%"),
    Cell("staleness", "Staleness", rules.AGE, "versions"),
)


@dataclass(frozen=True, slots=True)
class State:
    """Activity of a run besides its steps. Times in seconds, None if unknown."""

    status: str
    error: str | None = None
    seconds_since_step: float | None = None
    step_seconds: float | None = None
    is_training: bool = True
    """Whether steps are still to come."""


def cells(history: History, found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Returns the health strip, without cells for metrics that the run does not have."""
    shown = []
    for cell in CELLS:
        latest = history.mean(cell.metric)
        if latest is None:
            continue
        parts = cell.metric.split(" / ")
        own = next((finding for finding in found if finding.metrics and finding.metrics[0] in parts), None)
        in_percent = 100 * latest if cell.unit == "%" and len(parts) == 2 else latest
        shown.append(
            {
                **{name: getattr(cell, name) for name in ("name", "title", "metric", "unit")},
                "latest": in_percent,
                "words": own.words if own else trend(history, cell.metric),
                "attention": own is not None,
            }
        )
    return shown


HALF, TWICE = 0.5, 2.0
LEAST_NO_SIGNAL = 30.0
"""Percent of groups without a signal from which on the verdict mentions them."""


def trend(history: History, metric: str) -> str:
    """Returns how the last 10 steps differ from the first 10, and whether the metric still changes.

    A difference counts if it exceeds twice its standard error. With fewer than 12 steps it is `too early`. The last 10
    steps are compared with the 10 before to find whether the metric still changes.
    """
    now, before = history.last(metric.partition(" / ")[0]), history.last(metric.partition(" / ")[0], WINDOW, WINDOW)
    if len(now) < 2 or len(before) < 2:
        return "too early"
    first = max(0, len(history.steps) - WINDOW)
    overall, recent = (_direction(history, metric, skip) for skip in (first, WINDOW))
    latest, earliest = history.mean(metric) or 0.0, history.mean(metric, WINDOW, first) or 0.0
    words = {1: "up", -1: "down", 0: ""}[overall]
    if overall and earliest > 0 and not HALF < latest / earliest < TWICE:
        words = "halved" if overall < 0 else "doubled"
    if not recent:
        return f"{words}, flat now" if words else "steady"
    still = "rising" if recent > 0 else "falling"
    return f"{words}, still {still}" if recent == overall else f"{words}, {still} now" if words else still


def _direction(history: History, metric: str, skip: int) -> int:
    """Compares the last 10 steps with the 10 that end `skip` steps earlier. Returns 1, -1, or 0 for noise."""
    top = metric.partition(" / ")[0]
    now, then = history.last(top), history.last(top, WINDOW, skip)
    if len(then) < 2:
        return 0
    error = (statistics.variance(now) / len(now) + statistics.variance(then) / len(then)) ** 0.5
    difference = (history.mean(metric) or 0.0) - (history.mean(metric, WINDOW, skip) or 0.0)
    if " / " in metric:
        error /= max(history.mean(metric.partition(" / ")[2]) or 0.0, 1e-12)
    return 0 if abs(difference) <= max(2 * error, 1e-12) else 1 if difference > 0 else -1


def verdict(history: History, found: Sequence[Finding], state: State) -> list[dict[str, Any]]:
    """Returns sentences: the outcome, the worst problem, and one advice if the run can still use it.

    An error or a stall comes first. Many groups without a signal are mentioned beside another problem.
    """
    worst = list(found)
    if state.status == "live" and state.is_training:
        stall = rules.stalled(state.seconds_since_step, state.step_seconds)
        worst[:0] = [] if stall is None else [stall]
    ended = _end(state)
    facts = [*ended, *(_sentence(each.text, each.metrics) for each in worst)]
    urgent = len(ended) or int(any(each.level == "error" for each in worst[:1]))
    outcome = facts[urgent:urgent] = _outcome(history)
    advice = [
        _sentence(each.advice, (*each.metrics, *each.advised)) for each in worst[:1] if state.status != "finished"
    ]
    is_named = any(rules.NO_SIGNAL in each["metrics"] for each in [*facts[: 2 + urgent], *advice])
    signal = [] if urgent or is_named else _no_signal(history)
    if not (worst or ended or signal):
        is_open = state.status in ("live", "unknown")
        waits = "No step has ended yet." if is_open else "The run ended before its first step."
        facts += [_sentence("Nothing stands out." if history.steps else waits, ())] * (is_open or not outcome)
    return [*facts[: 2 + urgent], *signal, *advice]


def progress(steps: Sequence[int], started: Values, ended: Values, num_steps: int | None, live: bool) -> dict[str, Any]:
    """Returns the finished steps, and the seconds left at the median duration of the last 10 steps."""
    seconds = step_seconds(started, ended)
    done = steps[-1] + 1 if steps else 0
    left = None
    if live and seconds is not None and num_steps is not None:
        left = max(0, num_steps - done) * seconds
    return {"step": done, "num_steps": num_steps, "seconds_left": left}


def step_seconds(started: Values, ended: Values) -> float | None:
    """Returns the median duration of the last 10 steps, None without any."""
    pairs = list(zip(started, ended, strict=True))[-WINDOW:]
    durations = [end - start for start, end in pairs if start is not None and end is not None]
    return statistics.median(durations) if durations else None


RULE_KINDS = frozenset(rule.__name__ for rule in rules.RULES)
REPEATED_KINDS = RULE_KINDS | {"disk"}  # kinds that `watch` reports again while the problem lasts
DISK_SECONDS = 1.1 * DISK_SILENT_SECONDS  # without another report, after which the disk has space again
STEPS_THAT_RESOLVE = {"stalled": 1, "log": rules.WINDOW}  # by kind of alert: number of later steps that resolve it

KINDS_AT_START = frozenset({"config", "environment"})  # of remarks that every attempt reports at its start

_SERVER = re.compile(r"^(server \d+) is (?:down|back)")
_EVAL = re.compile(r"^(?:eval )?(\S+) at version \d+")
_CHECKPOINT = re.compile(r"^(the checkpoint) after step \d+ was ")


def alerts(
    rows: Sequence[Mapping[str, Any]], newest_attempt: int, found: Sequence[Finding], ended: Values = ()
) -> list[dict[str, Any]]:
    """Returns recorded alerts, newest first like `rows`. Repeated reports of one problem are merged into one alert.

    Of the remarks at the start, and of the results of one eval at one version, only those of the newest attempt are
    listed.

    `ended` are the end times of the steps, in Unix seconds. `first_step` and `first_time` belong to the first report,
    `count` is the number of reports. An alert is resolved if its rule finds nothing now, a step has ended since the
    stall, `rules.WINDOW` steps followed the log line, a nearly full disk is no longer reported every hour, the server
    is back, a later eval has a result, a later checkpoint was written, it belongs to an earlier attempt, or it only
    informs.
    """
    now = {finding.kind for finding in found}
    works: set[str] = set()
    newer: dict[tuple[str, int], dict[str, Any]] = {}
    newest: dict[str, int] = {}
    shown = []
    for row in rows:
        message, kind, attempt = row["message"] or "", row["kind"], row["attempt"] or 0
        about = _SERVER.match(message) or _EVAL.match(message) or _CHECKPOINT.match(message)
        if about and row["level"] == "info":
            works.add(about[1])
        subject = kind if kind in KINDS_AT_START else message.partition(":")[0] if kind == "eval" else None
        if subject and row["level"] == "info" and attempt < newest.setdefault(subject, attempt):
            continue
        same = newer.get((kind, attempt))
        if same and _lasted(row, same):
            same |= {"first_step": row["step"], "first_time": row["time"], "count": same["count"] + 1}
            continue
        title, _, text = message.partition(". ")
        alert = {
            **{name: row[name] for name in ("step", "time", "level", "kind", "advice")},
            "first_step": row["step"],
            "first_time": row["time"],
            "count": 1,
            "metrics": list(row["metrics"] or ()),
            "title": title.rstrip("."),
            "text": text,
            "resolved": row["level"] == "info"
            or attempt < newest_attempt
            or (kind in RULE_KINDS and (kind not in now or same is not None))
            or (kind == "disk" and (same is not None or _silent(row["time"], ended[-1:])))
            or (kind in STEPS_THAT_RESOLVE and _steps_followed(row["time"], ended, STEPS_THAT_RESOLVE[kind]))
            or bool(about and about[1] in works),
        }
        shown.append(alert)
        if kind in REPEATED_KINDS:
            newer[kind, attempt] = alert
    return shown


def _steps_followed(time: float | None, ended: Values, count: int) -> bool:
    """Returns whether `count` steps ended after `time`."""
    nth_last = ended[-count] if len(ended) >= count else None
    return time is not None and nth_last is not None and time < nth_last


def _silent(reported: float | None, until: Values) -> bool:
    """Returns whether a nearly full disk would have been reported again before `until`."""
    return reported is not None and any(time is not None and time - reported > DISK_SECONDS for time in until)


def _lasted(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Returns whether two reports of one kind are about one problem that lasted from one to the other."""
    if earlier["kind"] == "disk":
        return not _silent(earlier["time"], [later["first_time"]])
    between = (earlier["step"], later["first_step"])
    return None not in between and 0 <= between[1] - between[0] <= SILENT_STEPS + WINDOW


def _end(state: State) -> list[dict[str, Any]]:
    if state.status == "failed":
        return [_sentence(f"The run failed: {state.error or 'no error was recorded'}", ())]
    if state.status == "dead":
        text = "The process of the run is gone, without an error. telescope train --resume continues it."
        return [_sentence(text, ())]
    return []


def _outcome(history: History) -> list[dict[str, Any]]:
    """Returns the first and the newest result of the first eval or, without evals, the change of the reward."""
    if history.evals:
        points = [point for point in history.evals if point.name == history.evals[0].name]
        texts = [_result(point) for point in (points[:1] if len(points) == 1 else (points[0], points[-1]))]
        metric = "" if points[0].metric == "correct" else f", {points[0].metric}"
        return [_sentence(f"{points[0].name}{metric}: {', '.join(texts)}.", (), is_outcome=True)]
    values = finite(history.columns.get(rules.REWARD, ()))
    if len(values) < 2:
        return []
    before, now = ends_of(values)
    window = min(WINDOW, len(values) // 2)
    first, last = ("step", "") if window == 1 else (f"{window} steps", f" {window}")
    texts = [f"{value:.3g}".replace("-", rules.MINUS) for value in (before, now)]
    text = f"Mean reward of all groups: {texts[0]} in the first {first}, {texts[1]} in the last{last}."
    return [_sentence(text, (rules.REWARD,), is_outcome=True)]


def _result(point: rules.EvalPoint) -> str:
    return f"{point.text}{point.interval and f' ({point.interval})'} {rules.after(point.step)}"


def _no_signal(history: History) -> list[dict[str, Any]]:
    values = finite(history.columns.get(rules.NO_SIGNAL, ()))
    share = statistics.fmean(values) if values else 0.0
    text = f"On average, {share:.0f} % of a step's groups had equal rewards: they were generated and taught nothing."
    return [_sentence(text, (rules.NO_SIGNAL,))] if share >= LEAST_NO_SIGNAL else []


def _sentence(text: str, metrics: Sequence[str], *, is_outcome: bool = False) -> dict[str, Any]:
    return {"text": text, "metrics": list(metrics), "is_outcome": is_outcome}
