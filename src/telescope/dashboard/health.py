"""What stands out in a run: rules over the last steps, as plain functions.

Owns the rules, their limits and their words. A rule reads step metrics and names them; a limit has a reason. Does not
own the metrics (docs/metrics.md) or the alerts that the run itself recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Values = Sequence[float | None]
Columns = Mapping[str, Values]

WINDOW = 10
"""Steps that a cell and a rule read."""

MINUS = "\u2212"
STALLED_FACTOR = 10.0
STALLED_SECONDS = 300.0
"""A live run stands still when a step takes this many times the usual time, and at least these seconds."""


@dataclass(frozen=True)
class Finding:
    """A fact that costs something, and what to try. `words` are those of its cell."""

    words: str
    text: str
    advice: str
    metrics: tuple[str, ...]


Rule = Callable[[Columns], Finding | None]


@dataclass(frozen=True)
class Cell:
    """A number of the health strip: name, title, metric (`a / b` is a ratio), unit, and its rule, if any."""

    name: str
    title: str
    metric: str
    unit: str
    rule: Rule = lambda _: None


def last(columns: Columns, metric: str, window: int = WINDOW, skip: int = 0) -> list[float]:
    """Returns the measured values of the last `window` steps, `skip` steps before the end."""
    values = columns.get(metric, ())
    end = len(values) - skip
    return measured(values[max(0, end - window) : end])


def measured(values: Values) -> list[float]:
    """Returns the values that are numbers."""
    return [value for value in values if value is not None and value == value]


def mean(columns: Columns, metric: str, window: int = WINDOW, skip: int = 0) -> float | None:
    """Returns the mean over the last steps, None without values. `a / b` is the ratio of two sums."""
    top, ratio, bottom = metric.partition(" / ")
    values = last(columns, top, window, skip)
    if not ratio:
        return statistics.fmean(values) if values else None
    below = sum(last(columns, bottom, window, skip))
    return sum(values) / below if values and below > 0 else None


WAIT = "timing_waiting_for_data / timing_step_total"
NO_SIGNAL = "discarded/zero_advantage/pct"
REWARD = "reward/all_groups/mean"
TRUNCATED = "stop_reason_length_pct"
KL = "kl_divergence_inference"
AGE = "staleness/token_age_mean"


def waiting(columns: Columns) -> Finding | None:
    """Above half of the time, more servers shorten a step more than a faster trainer."""
    share = mean(columns, WAIT)
    if share is None or share < 0.5:
        return None
    text = f"The trainer waits {share:.0%} of the time for answers."
    advice = "Add inference servers, or raise max_async_rollout."
    return Finding("waits for data", text, advice, tuple(WAIT.split(" / ")))


def no_signal(columns: Columns) -> Finding | None:
    """Above half, most generated tokens teach nothing."""
    share = mean(columns, NO_SIGNAL)
    reward = mean(columns, REWARD)
    if share is None or share < 50:
        return None
    hard = "easier" if reward is not None and reward < 0.5 else "harder"
    text = f"{share:.0f} % of the groups have equal rewards and are discarded."
    return Finding("mostly discarded", text, f"Use {hard} prompts, or more samples per prompt.", (NO_SIGNAL, REWARD))


def truncated(columns: Columns) -> Finding | None:
    """Above a tenth, the reward depends on the limit as much as on the answer."""
    share = mean(columns, TRUNCATED)
    if share is None or share < 10:
        return None
    text = f"{share:.0f} % of the answers are cut off."
    return Finding("many cut off", text, "Raise max_tokens, or set overlong_penalty_factor.", (TRUNCATED,))


def mismatch(columns: Columns) -> Finding | None:
    """Engines and trainer of one version differ by 0.001 to 0.01 nats in bfloat16; ten times that is another policy."""
    value = mean(columns, KL)
    if value is None or value < 0.1:
        return None
    text = f"Engine and trainer differ by {value:.2g} nats per token (KL)."
    return Finding("engine differs", text, "Run telescope verify, or lower max_off_policy_steps.", (KL,))


def entropy_collapse(columns: Columns) -> Finding | None:
    """A fifth of the first entropy is left: samples of a group are nearly equal."""
    values = measured(columns.get("entropy", ()))
    now = mean(columns, "entropy")
    if now is None or len(values) < 2 * WINDOW:
        return None
    before = statistics.fmean(values[:WINDOW])
    if before <= 0 or now > 0.2 * before:
        return None
    text = f"Entropy fell from {before:.2g} to {now:.2g} nats."
    return Finding("collapsed", text, "Lower the learning rate, or set entropy_coef.", ("entropy",))


def gradient_spike(columns: Columns) -> Finding | None:
    """A step of ten times the usual norm moves the weights as far as ten steps, unless it is clipped."""
    recent = last(columns, "grad_norm")
    usual = last(columns, "grad_norm", 5 * WINDOW)
    if len(recent) < len(columns.get("grad_norm", ())[-WINDOW:]):
        text = "The gradient norm is not a number in one of the last steps."
        return Finding("not a number", text, "Lower the learning rate, and look at the loss.", ("grad_norm",))
    if len(usual) < WINDOW:
        return None
    highest, median = max(recent), statistics.median(usual)
    if highest < 10 * median or highest == 0:
        return None
    text = f"The gradient norm reached {highest:.2g}, {highest / median:.0f} times its median."
    return Finding("spiked", text, "Lower grad_clip or the learning rate.", ("grad_norm",))


def reward_collapse(columns: Columns) -> Finding | None:
    """Less than half of the best ten steps is left, which is more than noise over as many groups."""
    now = mean(columns, REWARD)
    earlier = [mean(columns, REWARD, WINDOW, skip) for skip in range(WINDOW, len(columns.get(REWARD, ())), WINDOW)]
    best = max((value for value in earlier if value is not None), default=None)
    if now is None or best is None or best <= 0 or now > 0.5 * best:
        return None
    text = f"The reward fell to {now:.2g} from {best:.2g}."
    return Finding("fell", text, "Look at the answers before and after, and go back to a checkpoint.", (REWARD,))


def stale(columns: Columns) -> Finding | None:
    """Four versions behind, ratios leave the range that the losses trust."""
    age = mean(columns, AGE)
    if age is None or age < 4:
        return None
    text = f"Tokens are {age:.1f} versions old."
    return Finding("old", text, "Lower max_async_rollout, or add inference servers.", (AGE,))


CELLS = (
    Cell("reward", "Reward", REWARD, "", reward_collapse),
    Cell("wait", "Trainer waits", WAIT, "%", waiting),
    Cell("entropy", "Entropy", "entropy", "nats", entropy_collapse),
    Cell("kl", "KL to engine", KL, "nats", mismatch),
    Cell("grad_norm", "Gradient norm", "grad_norm", "", gradient_spike),
    Cell("length", "Answer tokens", "rollouts/tokens_completion/mean", "tokens"),
    Cell("truncated", "Cut off", TRUNCATED, "%", truncated),
    Cell("no_signal", "No signal", NO_SIGNAL, "%", no_signal),
    Cell("staleness", "Token age", AGE, "versions", stale),
)


def cells(columns: Columns) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Returns the health strip and what its rules found. A metric that the run does not have gives no cell."""
    shown, findings = [], []
    for cell in CELLS:
        latest = mean(columns, cell.metric)
        if latest is None:
            continue
        found = cell.rule(columns)
        if found:
            findings.append(found)
        in_percent = 100 * latest if cell.unit == "%" and " / " in cell.metric else latest
        shown.append(
            {
                **{name: getattr(cell, name) for name in ("name", "title", "metric", "unit")},
                "latest": in_percent,
                "words": found.words if found else trend(columns, cell.metric),
                "attention": found is not None,
            }
        )
    return shown, findings


def trend(columns: Columns, metric: str) -> str:
    """Returns `rising`, `falling` or `steady`: the last 10 steps against the 10 before, by twice the standard error."""
    top = metric.partition(" / ")[0]
    now, before = last(columns, top), last(columns, top, WINDOW, WINDOW)
    if len(now) < 2 or len(before) < 2:
        return "too early to say"
    error = (statistics.variance(now) / len(now) + statistics.variance(before) / len(before)) ** 0.5
    difference = (mean(columns, metric) or 0.0) - (mean(columns, metric, WINDOW, WINDOW) or 0.0)
    if " / " in metric:
        error /= max(statistics.fmean(last(columns, metric.partition(" / ")[2])), 1e-12)
    if abs(difference) <= max(2 * error, 1e-12):
        return "steady"
    return "rising" if difference > 0 else "falling"


def verdict(columns: Columns, steps: Sequence[int], state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns at most two facts and one advice. The first says how the run is.

    `state` has `status`, `error`, `seconds_since_step`, `step_seconds` (of the last steps, may be None).
    """
    _, findings = cells(columns)
    first = _end(state) or _stalled(state)
    sentences: list[dict[str, Any]] = []
    if first:
        sentences.append(first)
    elif not steps:
        sentences.append(_sentence("No step has ended yet.", ()))
    elif findings:
        sentences.append(_sentence(findings[0].text, findings[0].metrics))
    else:
        sentences.append(_sentence("Nothing stands out.", ()))
    progress = _reward_change(columns)
    if first and findings:
        sentences.append(_sentence(findings[0].text, findings[0].metrics))
    elif progress:
        sentences.append(progress)
    if findings and state["status"] == "live":
        sentences.append(_sentence(findings[0].advice, findings[0].metrics))
    return sentences


def progress(steps: Sequence[int], started: Values, ended: Values, num_steps: int | None, live: bool) -> dict[str, Any]:
    """Returns the number of finished steps and the seconds left at the median duration of the last 10."""
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


def alert(row: Mapping[str, Any], newest_attempt: int) -> dict[str, Any]:
    """Returns a recorded alert. One of an earlier attempt, or only for information, counts as resolved."""
    title, _, text = (row["message"] or "").partition(". ")
    resolved = row["level"] == "info" or (row["attempt"] or 0) < newest_attempt
    kept = {name: row[name] for name in ("step", "time", "level")}
    return {**kept, "title": title.rstrip("."), "text": text, "resolved": resolved}


def _end(state: Mapping[str, Any]) -> dict[str, Any] | None:
    if state["status"] == "failed":
        return _sentence(f"The run failed: {state['error'] or 'no error was recorded'}", ())
    if state["status"] == "dead":
        return _sentence("The process of the run is gone, without an error. telescope train --resume continues it.", ())
    return None


def _stalled(state: Mapping[str, Any]) -> dict[str, Any] | None:
    silence, usual = state["seconds_since_step"], state["step_seconds"]
    if state["status"] != "live" or silence is None or usual is None:
        return None
    if silence < max(STALLED_FACTOR * usual, STALLED_SECONDS):
        return None
    text = f"No step has ended for {silence / 60:.0f} min; a step took {usual:.0f} s. Look at the logs."
    return _sentence(text, ("timing_step_total",))


def _reward_change(columns: Columns) -> dict[str, Any] | None:
    name = REWARD if columns.get(REWARD) else "reward/total/mean"
    values = measured(columns.get(name, ()))
    if len(values) < 2:
        return None
    window = min(WINDOW, len(values) // 2)
    before, now = statistics.fmean(values[:window]), statistics.fmean(values[-window:])
    span = "step" if window == 1 else f"{window} steps"
    texts = [f"{value:.3g}".replace("-", MINUS) for value in (before, now)]
    return _sentence(f"Reward {texts[0]} in the first {span}, {texts[1]} in the last.", (name,))


def _sentence(text: str, metrics: Sequence[str]) -> dict[str, Any]:
    return {"text": text, "metrics": list(metrics)}
