"""Defines the async window, the prompt ledger, and the age bound of groups.

Pure state, driven from outside. With B = `prompts_batch_size_for_trainer`, v = training steps whose weights are synced,
k = `max_async_rollout` and A = opened minus discarded groups, a group may be opened exactly if A < (v + 1 + k) * B. Of
these groups v * B are trained, so the others must be fewer than (1 + k) * B. So k = 0 is strictly synchronous, a
discarded group is replaced at once, and no group is generated in excess.

The ledger's invariant: prompts opened = trained + dropped (each with a reason) + still open. A prompt whose group
became too old is requeued and stays open.

A group's age is v minus the version of its oldest trained token; a group without tokens has no age. A running request
has the version that its server had when the request was sent, the oldest possible version. With m =
`max_off_policy_steps`, a group older than m is withdrawn: its finished samples are discarded, its running requests are
aborted, and its prompt is requeued at the front. After `MAX_REQUEUES` requeues, the prompt is dropped as too slow. So
no token older than m versions is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from telescope.orchestrator.groups import Group


def may_open(num_groups: int, batch_size: int, max_async_rollout: int) -> bool:
    """Returns whether one more group fits the window beside `num_groups` that are neither trained nor given up."""
    return num_groups < (1 + max_async_rollout) * batch_size


@dataclass
class Ledger:
    """Keeps the outcomes of all opened prompts. Only open prompts are kept individually; the rest are counts."""

    open: set[int] = field(default_factory=set)
    num_opened: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped prompts by reason."""
    num_requeued: int = 0
    """Number of requeues over all prompts."""
    requeues: dict[int, int] = field(default_factory=dict)
    """Number of requeues of each requeued prompt without an outcome."""

    def __post_init__(self) -> None:
        self._waiting: set[int] = set()
        """Requeued prompts without a group."""

    @property
    def num_groups(self) -> int:
        """Returns how many groups are neither trained nor given up."""
        return len(self.open) - len(self._waiting)

    def opened(self, n: int) -> None:
        """Counts a group opened for prompt n, for the first time or after a requeue."""
        if n in self._waiting:
            self._waiting.remove(n)
            return
        assert n not in self.open, f"prompt {n} was opened twice"
        self.open.add(n)
        self.num_opened += 1

    def requeued(self, n: int) -> None:
        """Counts a requeue of prompt n, which waits for another group."""
        assert n in self.open, f"prompt {n} is not open"
        assert n not in self._waiting, f"prompt {n} was requeued twice"
        self._waiting.add(n)
        self.requeues[n] = self.requeues.get(n, 0) + 1
        self.num_requeued += 1

    def trained(self, n: int) -> None:
        self._settle(n)
        self.num_trained += 1

    def drop(self, n: int, reason: str) -> None:
        self._settle(n)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _settle(self, n: int) -> None:
        assert n not in self._waiting, f"prompt {n} has no group"
        self.open.remove(n)
        self.requeues.pop(n, None)

    def reopening(self, kept: set[int], undropped: Collection[str] = ()) -> Ledger:
        """Returns the ledger of a run that opens all open prompts but `kept` again, and prompts dropped for reasons."""
        return Ledger(
            kept,
            self.num_opened - (len(self.open) - len(kept)) - len(undropped),
            self.num_trained,
            dict(Counter(self.dropped) - Counter(undropped)),
            self.num_requeued,
            dict(self.requeues),
        )

    def is_balanced(self) -> bool:
        """Checks the invariant of the module docstring."""
        return self.num_opened == self.num_trained + sum(self.dropped.values()) + len(self.open)


MAX_REQUEUES = 2
"""Most requeues of a prompt whose group became too old. Without this bound, a prompt whose completions always take
longer than m steps would occupy the window forever."""

TOO_SLOW = "too_slow"
MAX_ASYNC = "max_async"  # discard reason of groups that became too old


@dataclass(frozen=True)
class Staleness:
    """The age bound of a run. `max_age` is `max_off_policy_steps`, or -1 for no bound."""

    max_age: int

    def is_stale(self, group: Group, version: int) -> bool:
        """Returns whether the group is too old at policy version `version`."""
        # No token is older than the version at which its group was opened, because every open server has loaded it. So
        # most groups are decided without their samples, which matters with thousands running.
        if self.max_age < 0 or version - group.start_version <= self.max_age:
            return False
        oldest = group.oldest_version()
        return oldest is not None and version - oldest > self.max_age

    def stale(self, groups: Iterable[Group], version: int) -> list[Group]:
        """Returns the stale groups, newest prompt first, so that requeueing each at the front restores the order."""
        return sorted((g for g in groups if self.is_stale(g, version)), key=lambda g: -g.group_id)
