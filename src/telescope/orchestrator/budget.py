"""The error budget of each environment.

Stops a run whose samples mostly fail.

A failed sample is masked. But a run whose environment mostly fails does not train on what the user intended, so it
stops with the causes.

Prompts and samples are counted separately, against the same share, because prompts are rendered ahead: they would all
fail before the first sample could succeed.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass

from telescope.errors import RunError
from telescope.utils.text import plain, single_line

MIN_FAILURES = 16
"""Failures before a share above 0 is checked, so that a bad first minute does not end a run."""

WINDOW = 512
"""Number of newest outcomes over which the share is computed."""

_PLACE = re.compile(r"^environment .*?, item \d+(, rollout \S+)?: ")
"""Prefix of the pool's messages, which differs between samples with the same cause."""

_WORKER_LOG = re.compile(r"environment-\d+\.log")


@dataclass(frozen=True, slots=True)
class _Failure:
    item: int
    message: str

    @property
    def cause(self) -> str:
        """The message without the worker's number, equal for equal causes."""
        return _WORKER_LOG.sub("environment.log", self.message)


class ErrorBudget:
    """Failure shares of each environment's samples and prompts, over sliding windows.

    `sample_failed` and `prompt_failed` raise RunError with the most common causes when the budget is exhausted.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._min_failures = MIN_FAILURES if max_share > 0 else 1
        self._outcomes: dict[tuple[str, str], deque[_Failure | None]] = {}

    def sample_succeeded(self, environment: str) -> None:
        """Counts a sample that was scored."""
        self._window("samples", environment).append(None)

    def sample_failed(self, environment: str, item: int, message: str) -> None:
        """Counts a sample with an environment failure."""
        self._failed("samples", environment, item, message)

    def prompt_rendered(self, environment: str) -> None:
        """Counts an item with a usable prompt."""
        self._window("prompts", environment).append(None)

    def prompt_failed(self, environment: str, item: int, message: str) -> None:
        """Counts an item without a usable prompt."""
        self._failed("prompts", environment, item, message)

    def state_dict(self) -> dict[str, list[tuple[int, str] | None]]:
        """Returns the outcomes in the windows: None, or item and message of a failure."""
        return {
            f"{what}/{environment}": [None if o is None else (o.item, o.message) for o in outcomes]
            for (what, environment), outcomes in self._outcomes.items()
        }

    def load_state_dict(self, values: dict[str, list[tuple[int, str] | None]]) -> None:
        """Inverse of `state_dict`."""
        for name, outcomes in values.items():
            what, _, environment = name.partition("/")
            self._window(what, environment).extend(None if o is None else _Failure(*o) for o in outcomes)

    def _window(self, what: str, environment: str) -> deque[_Failure | None]:
        return self._outcomes.setdefault((what, environment), deque(maxlen=WINDOW))

    def _failed(self, what: str, environment: str, item: int, message: str) -> None:
        outcomes = self._window(what, environment)
        outcomes.append(_Failure(item, _shortened(message)))
        failures = [outcome for outcome in outcomes if outcome is not None]
        if len(failures) < self._min_failures or len(failures) <= self._max_share * len(outcomes):
            return
        raise RunError(
            f"environment {environment!r} failed {len(failures)} of its last {len(outcomes)} {what}, more than "
            f"environment_error_budget = {self._max_share:g}. Most common: {_most_common(failures)}. "
            "Fix the environment, or raise environment_error_budget or environment_timeout_seconds."
        )


def _shortened(message: str) -> str:
    """Returns a message's first and last line without its prefix."""
    lines = [line for line in plain(_PLACE.sub("", message.strip())).split("\n") if line.strip()] or ["no message"]
    first, last = single_line(lines[0]), single_line(lines[-1])
    return first if len(lines) == 1 else f"{first} ... {last}"


def _most_common(failures: list[_Failure]) -> str:
    newest = {failure.cause: failure for failure in failures}
    counts = Counter(failure.cause for failure in failures)
    return "; ".join(
        f"{count} x {newest[cause].message}, last with item {newest[cause].item}"
        for cause, count in counts.most_common(3)
    )
