"""The error budget of each environment: how many of its samples may fail before the run is stopped.

A failing environment masks samples, it does not fake rewards; but a run whose environment mostly fails is not training
on what the user thinks it is, and must stop and say so.
"""

from __future__ import annotations

from collections import Counter, deque

from telescope.errors import RunError

MIN_FAILURES = 16
"""Failures before the share counts, so that a bad first minute does not end a run."""

WINDOW = 512
"""The share is taken over this many of the newest outcomes."""


class ErrorBudget:
    """Shares of failures per environment, over a sliding window."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._outcomes: dict[str, deque[bool]] = {}
        self._messages: dict[str, Counter[str]] = {}

    def succeeded(self, environment: str) -> None:
        """Count one good outcome."""
        self._outcomes.setdefault(environment, deque(maxlen=WINDOW)).append(False)

    def failed(self, environment: str, message: str) -> None:
        """Count a failure. Raises RunError with the commonest messages when the budget is used up."""
        outcomes = self._outcomes.setdefault(environment, deque(maxlen=WINDOW))
        outcomes.append(True)
        messages = self._messages.setdefault(environment, Counter())
        messages[message.strip().splitlines()[-1][:300] if message.strip() else "no message"] += 1
        failures = sum(outcomes)
        if failures >= MIN_FAILURES and failures > self._max_share * len(outcomes):
            commonest = "; ".join(f"{count} x {text}" for text, count in messages.most_common(3))
            raise RunError(
                f"environment {environment!r} failed {failures} of its last {len(outcomes)} samples, more than "
                f"environment_error_budget = {self._max_share:g}. Commonest: {commonest}. "
                "Mend the environment, or raise environment_error_budget or environment_timeout_seconds."
            )
