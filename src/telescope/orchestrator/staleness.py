"""How old a group may become, and what is done with one that is older.

A group's age is v, the training steps whose weights are synced, less the version of its oldest trained token; a group
without tokens has no age. A request that is in the engine counts as if its first token were of the version that its
server was known to hold when it was sent, the oldest that it can be. With m = `max_off_policy_steps`, a group older
than m is withdrawn: what it holds is discarded, what is under way is aborted, and its draw goes back to the front of
the queue, `MAX_RETURNS` times, after which it is dropped as too slow. So no token older than m versions is trained.

Pure: the orchestrator asks at every sync and when it forms a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from telescope.orchestrator.groups import Group

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
