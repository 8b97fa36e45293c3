"""Holds the current state of a run for the live view, the watchdog and errors, and summarizes the run.

Only the orchestrator's event loop writes the fields of `RunStatus`. Readers on other threads see plain numbers and
strings, which may be slightly old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.health.rules import Finding, Level, ends_of
from telescope.health.watch import Watch
from telescope.record.recorder import REPORTED
from telescope.utils.text import plain, pluralize, single_line

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig
    from telescope.evals.runner import EvalResult


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One finished training step, for lines in a pipe and for the summary."""

    step: int
    """Counts from 0, as in the tables."""
    reward_mean: float
    """Mean over all samples scored since the step before, including discarded groups."""
    reward_trained: float
    seconds: float
    staleness_mean: float
    tokens_per_second: float
    kl_inference: float
    grad_norm: float
    waited_share: float
    phase: str = "training"
    """Phase of the run when it finished."""


@dataclass
class RunStatus:
    """Progress of one run. `phase` is a short sentence; `components` maps each component to its current activity."""

    run_name: str
    num_steps: int
    phase: str = "starting"
    run_dir: str = ""
    started_at: float = field(default_factory=time.time)
    step: int = 0
    version: int = 0
    components: dict[str, str] = field(default_factory=dict)
    history: list[StepSummary] = field(default_factory=list)
    num_generating: int = 0
    num_slots: int = 0
    num_open_groups: int = 0
    num_finished_groups: int = 0
    num_discarded_groups: int = 0
    num_long_prompts: int = 0
    """Prompts left out because they leave no space for a completion."""
    num_masked_samples: int = 0
    num_samples_finished: int = 0
    num_tokens_generated: int = 0
    eval_done: int = 0
    eval_total: int = 0
    messages: deque[str] = field(default_factory=lambda: deque(maxlen=6))
    last_progress_at: float = field(default_factory=time.monotonic)
    token_times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))
    health: Watch = field(default_factory=Watch)
    engines_idle_seconds: float | None = None
    """Time without a request since the last step, averaged over the engines. None if it is not measured."""
    last_step_at: float | None = None
    """When the last step ended, in monotonic time. None outside training."""
    _recorded: set[str] = field(default_factory=set)
    _alerts: list[dict[str, Any]] = field(default_factory=list)
    _add_alert: Callable[[dict[str, Any]], None] | None = None

    def now(self) -> dict[str, Any]:
        """Returns the current activity of the run, for `now.json`. May be called from any thread."""
        numbers = (
            *("phase", "step", "num_steps", "version", "num_generating", "num_slots", "num_open_groups"),
            *("num_finished_groups", "num_discarded_groups", "num_masked_samples", "num_long_prompts"),
            *("eval_done", "eval_total"),
        )
        rest = {"tokens_per_second": self.tokens_per_second(), "seconds_left": self.seconds_left()}
        return {name: getattr(self, name) for name in numbers} | rest | {"components": dict(self.components)}

    def report(
        self, message: str, kind: str, level: Level = "info", *, log: logging.Logger | None = None, **more: Any
    ) -> None:
        """Shows a message's first line and records it as an alert with `more` columns. `log` gets the whole message."""
        if log is not None:
            log.log(logging.getLevelNamesMapping()[level.upper()], "%s", message, extra=REPORTED, stacklevel=2)
        message = _first_line(message)
        self.show(" ".join(filter(None, (message, more.get("advice")))))
        row = {"time": time.time(), "level": level, "kind": kind, "message": message, "step": self.step, **more}
        (self._add_alert or self._alerts.append)(row)

    def show(self, message: str) -> None:
        """Shows the first line of a message that is recorded as an alert."""
        shown = _first_line(message)
        self._recorded.add(shown)
        self.messages.append(shown)

    def unrecorded(self) -> list[str]:
        """Returns the messages that are no alerts, which come from trackers."""
        return [message for message in list(self.messages) if message not in self._recorded]

    def record_alerts(self, add: Callable[[dict[str, Any]], None]) -> None:
        """Records all alerts, including earlier ones. `add` is `Alerts.add`."""
        self._add_alert = add
        for row in self._alerts:
            add(row)
        self._alerts.clear()

    def trained(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Reports new findings after a step of `seconds`."""
        self.last_step_at = time.monotonic()
        self.report_findings(self.health.after_step(step, metrics, seconds), step)

    def detect_stall(self) -> None:
        """Reports a stall if no step has ended for long."""
        if self.last_step_at is not None and self.step < self.num_steps:
            self.report_findings(self.health.while_waiting(time.monotonic() - self.last_step_at), self.step)

    def report_findings(self, news: Sequence[Finding], step: int) -> None:
        """Reports findings of `health`, which were made after `step`."""
        for found in news:
            more = {"advice": found.advice, "metrics": list(found.metrics), "step": step - found.steps_ago}
            self.report(found.text, found.kind, found.level, log=logger, **more)

    def progressed(self) -> None:
        """Resets the watchdog, because a sample, a turn of one or a step finished."""
        self.last_progress_at = time.monotonic()

    def generated(self, num_tokens: int) -> None:
        """Counts a finished sample and its sampled tokens."""
        self.num_samples_finished += 1
        self.num_tokens_generated += num_tokens
        self.token_times.append((time.monotonic(), num_tokens))

    def tokens_per_second(self, window_seconds: float = 10.0) -> float:
        """Returns tokens sampled per second over the last `window_seconds`."""
        now = time.monotonic()
        recent = [(at, count) for at, count in list(self.token_times) if now - at <= window_seconds]
        return sum(count for _, count in recent) / window_seconds if recent else 0.0

    def seconds_left(self) -> float | None:
        """Estimates the remaining time from the median of the last steps. None before the second step."""
        if len(self.history) < 2:
            return None
        recent = sorted(summary.seconds for summary in self.history[-20:])
        return recent[len(recent) // 2] * (self.num_steps - self.step)


def _first_line(message: str) -> str:
    return plain(message).strip().partition("\n")[0]


class Interrupted(Exception):
    """Raised when the user stops the run while it is starting or evaluating."""


@dataclass(frozen=True)
class RunSummary:
    """The result of a run. `heldout_*` are results of the first eval with held-out items, or else of the first eval.

    `status` is `finished`, `stopped` (by the user) or `failed`. `seconds` covers the whole run, `training_seconds` the
    time from the first prompt to the last weight sync.
    """

    status: str
    run_name: str
    run_dir: str
    steps: int
    seconds: float
    training_seconds: float | None
    config_hash: str
    steps_of_attempt: int | None = None
    """Steps since the run was started or continued. `seconds` and the rewards refer to these steps."""
    heldout_before: float | None = None
    heldout_after: float | None = None
    heldout_metric: str | None = None
    """Metric whose means they are: `correct` or `reward`."""
    heldout_temperature: float | None = None
    heldout_items: int | None = None
    heldout_failed: list[int] = field(default_factory=list)
    """Samples in `heldout_before` and in `heldout_after` that failed and count as wrong."""
    heldout_gain_interval: list[float] | None = None
    """95 % confidence interval of `heldout_after` minus `heldout_before`, paired over the items."""
    reward_first: float | None = None
    reward_last: float | None = None
    """Mean rewards of all scored samples over the first and the last 10 steps of this attempt."""
    reward_trained_first: float | None = None
    reward_trained_last: float | None = None
    """The same for trained samples. They exclude groups of equal rewards, so these means say little."""
    error: str | None = None
    """Why the run failed, in one line."""
    model_dir: str | None = None
    """Folder of the trained model in Hugging Face format, or None if none was written."""
    record_error: str | None = None
    """Why the record is incomplete, or None if it is complete."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    eval_problems: list[str] = field(default_factory=list)
    """Sentences about evals that failed, were skipped or cancelled, or had many failed samples."""

    @property
    def sentence(self) -> str:
        """One line for the user, without the error message."""
        steps = pluralize(self.steps, "step")
        if self.status == "finished":
            continued = f", the last {self.steps_of_attempt}" if self.is_continued and self.steps_of_attempt else ""
            return f"finished {steps}{continued} in {self.seconds:.0f} s"
        if self.status == "stopped":
            return f"stopped after {steps}, as requested"
        return f"failed after {steps}"

    @property
    def is_continued(self) -> bool:
        """Returns whether an earlier attempt trained some of the steps."""
        return self.steps_of_attempt is not None and self.steps_of_attempt < self.steps


def headline_of(evals: Sequence[EvalResult]) -> EvalResult | None:
    """Returns the result of the first eval, preferably with held-out items."""
    return next((result for result in evals if result.held_out), evals[0] if evals else None)


def summarize(
    config: TelescopeConfig,
    run_dir: Path,
    status: RunStatus,
    evals: Sequence[EvalResult],
    eval_problems: Sequence[str] = (),
    *,
    seconds: float,
    training_seconds: float | None,
    model_dir: Path | None = None,
    error: BaseException | None,
    interrupted: bool,
    record_error: str | None = None,
) -> RunSummary:
    """Summarizes a run that has ended, with or without an error."""
    if error is not None and not isinstance(error, asyncio.CancelledError | Interrupted):
        outcome, message = "failed", single_line(f"{type(error).__name__}: {error}")
    elif error is not None or interrupted:
        outcome, message = "stopped", None
    else:
        outcome, message = "finished", None
    headline = headline_of(evals)
    of_headline = [r for r in evals if headline is not None and (r.number, r.name) == (headline.number, headline.name)]
    before = next((r for r in of_headline if r.version == 0), None)
    after = next((r for r in reversed(of_headline) if r.version > 0), None)
    first, last = ends_of([step.reward_mean for step in status.history])
    trained_first, trained_last = ends_of([step.reward_trained for step in status.history])
    return RunSummary(
        outcome, config.wandb_run_name, str(run_dir), status.step, round(seconds, 3),
        None if training_seconds is None else round(training_seconds, 3),
        config_hash=config.hash, steps_of_attempt=len(status.history),
        heldout_before=before.accuracy if before else None,
        heldout_after=after.accuracy if after else None,
        heldout_metric=headline.metric if headline else None,
        heldout_temperature=headline.temperature if headline else None,
        heldout_items=headline.num_items if headline else None,
        heldout_failed=[result.num_failed for result in (before, after) if result],
        heldout_gain_interval=[after.gain.low, after.gain.high] if before and after and after.gain else None,
        reward_first=first, reward_last=last,
        reward_trained_first=trained_first, reward_trained_last=trained_last,
        error=message,
        record_error=record_error,
        model_dir=None if model_dir is None else str(model_dir),
        evals=[
            {
                "name": r.name, "version": r.version, "metric": r.metric, "accuracy": r.accuracy,
                "items": r.num_items, "scored": r.num_scored, "failed": r.num_failed, "temperature": r.temperature,
                "seconds": round(r.seconds, 3), "metrics": r.metrics, "completions_per_item": r.num_completions,
                "accuracy_interval": r.estimate and [r.estimate.low, r.estimate.high],
                "gain": r.gain and r.gain.mean, "gain_interval": r.gain and [r.gain.low, r.gain.high],
            }
            for r in evals
        ],
        eval_problems=list(eval_problems),
    )  # fmt: skip
