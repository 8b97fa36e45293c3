"""How far generation may run ahead of training, and what became of every draw.

Pure state, driven from outside. With B = `prompts_batch_size_for_trainer`, v = training steps whose weights are synced,
k = `max_async_rollout` and A = groups opened less groups given up, a group may be opened if and only if
A < (v + 1 + k) * B. So k = 0 is strictly synchronous, a discarded group is replaced at once, and nothing is surplus.

The ledger's invariant: draws opened = trained + dropped (each with a reason) + still open. A draw whose group became
too old goes back to the queue and stays open: its fate is not final.

How old a group may become, and what is done with one that is older.

A group's age is v, the training steps whose weights are synced, less the version of its oldest trained token; a group
without tokens has no age. A request that is in the engine counts as if its first token were of the version that its
server was known to hold when it was sent, the oldest that it can be. With m = `max_off_policy_steps`, a group older
than m is withdrawn: what it holds is discarded, what is under way is aborted, and its draw goes back to the front of
the queue, `MAX_RETURNS` times, after which it is dropped as too slow. So no token older than m versions is trained.

Pure: the orchestrator asks at every sync and when it forms a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from telescope.orchestrator.groups import Group


@dataclass
class AsyncWindow:
    """Decides whether a group may be opened. `version` is v, `outstanding` is A."""

    batch_size: int
    max_async_rollout: int
    version: int = 0
    outstanding: int = 0

    def may_open(self) -> bool:
        """True when one more group fits the window."""
        return self.outstanding < (self.version + 1 + self.max_async_rollout) * self.batch_size

    def opened(self) -> None:
        """Count a group that was just opened."""
        assert self.may_open(), "a group was opened outside the async window"
        self.outstanding += 1

    def given_up(self) -> None:
        """Count a group that will never be trained; its place is free at once."""
        assert self.outstanding > 0
        self.outstanding -= 1

    def synced(self) -> None:
        """Count a training step whose weights have reached the engines."""
        self.version += 1


@dataclass
class Ledger:
    """Every draw that was opened, and its fate. Only draws still open are kept one by one; the rest are counts."""

    open: set[int] = field(default_factory=set)
    num_opened: int = 0
    num_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    num_returned: int = 0
    """Times that a draw went back to the queue, over all draws."""
    _waiting: set[int] = field(default_factory=set)
    _returns: Counter[int] = field(default_factory=Counter)

    def opened(self, n: int) -> None:
        """A group was opened for draw n, for the first time or after a return."""
        if n in self._waiting:
            self._waiting.remove(n)
            return
        assert n not in self.open, f"draw {n} was opened twice"
        self.open.add(n)
        self.num_opened += 1

    def returned(self, n: int) -> None:
        """The group of draw n became too old; the draw waits to be opened again."""
        assert n in self.open, f"draw {n} is not open"
        assert n not in self._waiting, f"draw {n} was returned twice"
        self._waiting.add(n)
        self._returns[n] += 1
        self.num_returned += 1

    def returns(self, n: int) -> int:
        """How often draw n, which is open, was returned."""
        return self._returns[n]

    def trained(self, n: int) -> None:
        assert n not in self._waiting, f"draw {n} has no group"
        self.open.remove(n)
        self._returns.pop(n, None)
        self.num_trained += 1

    def drop(self, n: int, reason: str) -> None:
        assert n not in self._waiting, f"draw {n} has no group"
        self.open.remove(n)
        self._returns.pop(n, None)
        self.dropped[reason] += 1

    @property
    def waiting(self) -> frozenset[int]:
        """Draws that were returned and are not open as groups now."""
        return frozenset(self._waiting)

    def is_balanced(self) -> bool:
        """The invariant of the module docstring."""
        return self.num_opened == self.num_trained + sum(self.dropped.values()) + len(self.open)


MAX_RETURNS = 2
"""Times that a draw is asked again after its group became too old. A prompt whose answers always take longer than m
steps would otherwise hold its place in the window for ever."""

TOO_SLOW = "too_slow"
MAX_ASYNC = "max_async"
"""The name that the metrics document gives to what was discarded because it was too old."""


@dataclass(frozen=True)
class Staleness:
    """The bound of a run; `max_age` is `max_off_policy_steps`, -1 for none."""

    max_age: int

    def is_stale(self, group: Group, version: int) -> bool:
        """Whether the group is too old to be trained at policy version `version`."""
        # No token is older than the version at which its group was opened, which is that of every server that is up. So
        # most groups need no look at their samples, which matters with thousands under way.
        if self.max_age < 0 or version - group.start_version <= self.max_age:
            return False
        oldest = group.oldest_version()
        return oldest is not None and version - oldest > self.max_age

    def stale(self, groups: Iterable[Group], version: int) -> list[Group]:
        """The groups that are too old, newest draw first: returned to the front of a queue in this order, the oldest
        draw is the first to come out again."""
        return sorted((g for g in groups if self.is_stale(g, version)), key=lambda g: -g.group_id)
