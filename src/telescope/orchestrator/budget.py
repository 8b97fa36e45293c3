"""The error budget of each environment: how many of its samples may fail before the run is stopped.

A failing environment masks samples, it does not fake rewards; but a run whose environment mostly fails is not training
on what the user thinks it is, and must stop and say so.

Prompts are counted apart from samples, against the same share. A prompt that was made says nothing of the samples that
will come of it; and prompts are made ahead, so those that fail do so before a first sample could have succeeded.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass

from telescope.errors import RunError
from telescope.utils.text import plain, single_line

MIN_FAILURES = 16
"""Failures before a share other than 0 counts, so that a bad first minute does not end a run."""

WINDOW = 512
"""The share is taken over this many of the newest outcomes."""

_PLACE = re.compile(r"^environment .*?, item \d+(, rollout \S+)?: ")
"""How the environments' pool opens its messages: one cause has as many of these as it has samples."""

_WORKER_LOG = re.compile(r"environment-\d+\.log")


@dataclass(frozen=True, slots=True)
class _Failure:
    item: int
    told: str

    @property
    def cause(self) -> str:
        """What failures of one cause share; which worker it happened in is no part of it."""
        return _WORKER_LOG.sub("environment.log", self.told)


class ErrorBudget:
    """Shares of failures per environment, of its samples and of its prompts, over sliding windows.

    What counts a failure raises RunError with the commonest causes when the budget is used up.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._min_failures = MIN_FAILURES if max_share > 0 else 1
        self._outcomes: dict[tuple[str, str], deque[_Failure | None]] = {}

    def sample_succeeded(self, environment: str) -> None:
        """Count a sample that was scored."""
        self._window("samples", environment).append(None)

    def sample_failed(self, environment: str, item: int, message: str) -> None:
        """Count a sample that the environment failed."""
        self._failed("samples", environment, item, message)

    def prompt_made(self, environment: str) -> None:
        """Count an item whose prompt was made and can be asked."""
        self._window("prompts", environment).append(None)

    def prompt_failed(self, environment: str, item: int, message: str) -> None:
        """Count an item that gave no prompt that can be asked."""
        self._failed("prompts", environment, item, message)

    def _window(self, what: str, environment: str) -> deque[_Failure | None]:
        return self._outcomes.setdefault((what, environment), deque(maxlen=WINDOW))

    def _failed(self, what: str, environment: str, item: int, message: str) -> None:
        outcomes = self._window(what, environment)
        outcomes.append(_Failure(item, _told(message)))
        failures = [outcome for outcome in outcomes if outcome is not None]
        if len(failures) < self._min_failures or len(failures) <= self._max_share * len(outcomes):
            return
        raise RunError(
            f"environment {environment!r} failed {len(failures)} of its last {len(outcomes)} {what}, more than "
            f"environment_error_budget = {self._max_share:g}. Commonest: {_commonest(failures)}. "
            "Mend the environment, or raise environment_error_budget or environment_timeout_seconds."
        )


def _told(message: str) -> str:
    """A message without the place that it is about, as its first line and, where there are more, its last."""
    lines = [line for line in plain(_PLACE.sub("", message.strip())).split("\n") if line.strip()] or ["no message"]
    first, last = single_line(lines[0]), single_line(lines[-1])
    return first if len(lines) == 1 else f"{first} ... {last}"


def _commonest(failures: list[_Failure]) -> str:
    newest = {failure.cause: failure for failure in failures}
    counts = Counter(failure.cause for failure in failures)
    return "; ".join(
        f"{count} x {newest[cause].told}, last with item {newest[cause].item}" for cause, count in counts.most_common(3)
    )
