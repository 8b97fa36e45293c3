"""Limits the errors of each environment.

A failed sample is masked. But a run whose environment mostly fails does not train on what the user intended, so it
stops and reports the causes.

Prompts and samples are counted separately, against the same share, because prompts are rendered ahead: they would all
fail before the first sample could succeed.
"""

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Literal

from telescope.errors import RunError
from telescope.utils.text import plain, single_line

MIN_FAILURES = 16  # failures before a share above 0 is checked, so that a bad first minute does not end a run
WINDOW = 512  # number of newest outcomes over which the share is computed

_PLACE = re.compile(r"^environment .*?, item \d+(, rollout \S+)?: ")
"""Prefix of the pool's messages, which differs between samples that failed for the same reason."""
_NUMBER = re.compile(r"(?<!code )(?<!code: )(?<!status )(?<!HTTP )(?<!HTTP/1\.1 )(?<!signal )\b(0x[0-9a-f]+|\d+)")
"""A number that may differ between failures of one cause, such as a size or a port, unlike an exit code."""


What = Literal["samples", "prompts"]


Outcome = tuple[int, str] | None
"""None, or the item and message of a failure."""


class ErrorBudget:
    """Counts the failures of each environment. Above the allowed share, raises `RunError` with the causes."""

    def __init__(self, max_share: float, outcomes: Mapping[str, list[Outcome]] | None = None) -> None:
        """Continues from `outcomes`, which `state_dict` returned."""
        self._max_share = max_share
        self._min_failures = MIN_FAILURES if max_share > 0 else 1
        self._outcomes = {name: deque(newest, maxlen=WINDOW) for name, newest in (outcomes or {}).items()}
        """The newest outcomes by `what/environment`."""

    def succeeded(self, what: What, environment: str) -> None:
        """Counts a scored sample or a rendered prompt."""
        self._window(what, environment).append(None)

    def failed(self, what: What, environment: str, item: int, message: str) -> None:
        """Counts a sample or prompt for which its environment failed. Raises RunError with the most common causes."""
        outcomes = self._window(what, environment)
        lines = [line for line in plain(_PLACE.sub("", message.strip())).split("\n") if line.strip()] or ["no message"]
        ends = dict.fromkeys((single_line(lines[0]), single_line(lines[-1])))
        outcomes.append((item, " ... ".join(ends)))
        failures = [outcome for outcome in outcomes if outcome is not None]
        if len(failures) < self._min_failures or len(failures) <= self._max_share * len(outcomes):
            return
        by_kind: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for item, cause in failures:
            by_kind[_NUMBER.sub("", cause)].append((item, cause))
        common = "; ".join(
            f"{len(alike)} {'x' if len({cause for _, cause in alike}) == 1 else 'like'} {alike[-1][1]}, "
            f"last with item {alike[-1][0]}"
            for alike in sorted(by_kind.values(), key=len, reverse=True)[:3]
        )
        num_outcomes = len(outcomes)
        outcomes.clear()  # otherwise the first failure after a fix would end the resumed run
        raise RunError(
            f"environment {environment!r} failed {len(failures)} of its last {num_outcomes} {what}, more than "
            f"environment_error_budget = {self._max_share:g}. Most common: {common}. Fix the environment, or raise "
            "environment_error_budget or environment_timeout_seconds."
        )

    def state_dict(self) -> dict[str, list[Outcome]]:
        """Returns the outcomes in the windows."""
        return {name: list(outcomes) for name, outcomes in self._outcomes.items()}

    def _window(self, what: What, environment: str) -> deque[Outcome]:
        return self._outcomes.setdefault(f"{what}/{environment}", deque(maxlen=WINDOW))
