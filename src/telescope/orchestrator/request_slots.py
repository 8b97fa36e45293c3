"""Lanes: how many samples may be generating on each server at once, and who gets the next free place.

Owns the counts, the choice of server and the order of waiters; knows nothing of HTTP, Ray or tokens. A group stays on
one server so that its prompt is prefilled once; a server that is down gets nothing, and its groups move. A later turn
of a rollout that is under way is served before a new sample.

Invariants: 0 <= used <= capacity on every server; a lease is released exactly once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from telescope.errors import DeadlineExceeded
from telescope.rollout.types import Lease


@dataclass
class ServerSlots:
    """The lanes of one server. `up` is false while it is dead, restarting, or missing the current weights."""

    capacity: int
    up: bool = False
    used: int = 0
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_slots = list(range(self.capacity))

    @property
    def num_free(self) -> int:
        return self.capacity - self.used


@dataclass(order=True)
class _Waiter:
    priority: int
    order: int
    group: int = field(compare=False)
    future: asyncio.Future[Lease] = field(compare=False)


class RequestSlotPool:
    """Hands out lanes. Everything runs on one event loop; no method but `acquire` waits."""

    def __init__(self, capacities: list[int]) -> None:
        self._on_change: Callable[[], None] = lambda: None
        self.servers = [ServerSlots(capacity) for capacity in capacities]
        self._server_of_group: dict[int, int] = {}
        self._waiters: list[_Waiter] = []
        self._order = itertools.count()

    def on_change(self, notify: Callable[[], None]) -> None:
        """Have `notify` called whenever a lane came free, or a server came up or went down."""
        self._on_change = notify

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Wait for a lane for a sample of `group`; a later `turn` goes first.

        Raises DeadlineExceeded when no lane came free within `timeout` seconds.
        """
        waiter = _Waiter(-turn, next(self._order), group, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self._serve()
        try:
            async with asyncio.timeout(timeout):
                return await waiter.future
        except BaseException as error:
            # Cancelled or out of time; the lane may have been handed over in the same tick, so it goes back.
            if waiter.future.done() and not waiter.future.cancelled():
                self.release(waiter.future.result())
            waiter.future.cancel()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"no inference lane came free for group {group} within {timeout:.0f} s ({self.describe()})"
                ) from None
            raise

    def release(self, lease: Lease) -> None:
        """Give a lane back. A second release of the same lease is a bug."""
        assert not lease.released, "a lane was released twice"
        lease.released = True
        server = self.servers[lease.server]
        server.used -= 1
        heapq.heappush(server.free_slots, lease.slot)
        self._serve()
        self._on_change()

    def set_up(self, server: int, up: bool) -> None:
        """Open or close a server for new leases. Leases already out stay valid until released."""
        self.servers[server].up = up
        if not up:
            self._server_of_group = {g: s for g, s in self._server_of_group.items() if s != server}
        self._serve()
        self._on_change()

    def forget_group(self, group: int) -> None:
        """Drop a finished group's tie to its server."""
        self._server_of_group.pop(group, None)

    @property
    def has_spare_lane(self) -> bool:
        """True when a new group would be served at once.

        Whoever waits then is tied to a server that is full, such as one that took over another's groups, and has no
        use for the lane.
        """
        return any(server.up and server.num_free for server in self.servers)

    @property
    def num_used(self) -> int:
        return sum(server.used for server in self.servers)

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.future.done() for waiter in self._waiters)

    def describe(self) -> str:
        """The state of each server in a few words, for error messages."""
        return ", ".join(
            f"server {i}: {'up' if s.up else 'down'}, {s.used}/{s.capacity} lanes used"
            for i, s in enumerate(self.servers)
        )

    def _serve(self) -> None:
        """Give free lanes to waiters, first by turn and then by arrival; a waiter tied to a full server waits on."""
        skipped: list[_Waiter] = []
        while self._waiters:
            waiter = heapq.heappop(self._waiters)
            if waiter.future.done():
                continue
            lease = self._try_lease(waiter.group)
            if lease is None:
                skipped.append(waiter)
                if not any(server.up and server.num_free for server in self.servers):
                    break
                continue
            waiter.future.set_result(lease)
        for waiter in skipped:
            heapq.heappush(self._waiters, waiter)

    def _try_lease(self, group: int) -> Lease | None:
        index = self._server_of_group.get(group)
        if index is None:
            candidates = [i for i, server in enumerate(self.servers) if server.up and server.num_free]
            if not candidates:
                return None
            index = max(candidates, key=lambda i: (self.servers[i].num_free / self.servers[i].capacity, -i))
            self._server_of_group[group] = index
        server = self.servers[index]
        if not server.up or not server.num_free:
            return None
        server.used += 1
        return Lease(index, heapq.heappop(server.free_slots))


class GroupSlotPool(RequestSlotPool):
    """Lanes for `enable_individual_sample_lanes: false`: a group holds one lane, from its first sample to its last.

    Capacities count groups. All samples of a group generate in its lane at once; when its server goes down, the group
    takes a lane elsewhere.
    """

    def __init__(self, capacities: list[int]) -> None:
        super().__init__(capacities)
        self._lease_of_group: dict[int, asyncio.Future[Lease]] = {}

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """The group's lane, taken from the pool when it has none on a server that is up."""
        held = self._lease_of_group.get(group)
        if held is not None and held.done() and not self._is_usable(held):
            self._give_back(group)
            held = None
        if held is None:
            held = asyncio.ensure_future(super().acquire(group, turn=turn, timeout=timeout))
            self._lease_of_group[group] = held
        # Shielded: the samples of a group share the wait, and one that is cancelled must not end it for the others.
        lease = await asyncio.shield(held)
        return Lease(lease.server, lease.slot)

    def release(self, lease: Lease) -> None:
        """A sample is done with the lane; the group keeps it until `forget_group`."""
        assert not lease.released, "a lane was released twice"
        lease.released = True

    def forget_group(self, group: int) -> None:
        """The group is finished: its lane is free."""
        self._give_back(group)
        super().forget_group(group)

    def _is_usable(self, held: asyncio.Future[Lease]) -> bool:
        return not held.cancelled() and held.exception() is None and self.servers[held.result().server].up

    def _give_back(self, group: int) -> None:
        held = self._lease_of_group.pop(group, None)
        if held is None:
            return
        if held.done() and not held.cancelled() and held.exception() is None:
            super().release(held.result())
        else:
            held.cancel()


def make_request_slots(
    *, individual: bool, num_servers: int, groups_per_server: int, group_size: int
) -> RequestSlotPool:
    """The lanes of a run: one per sample, or one per group."""
    if individual:
        return RequestSlotPool([groups_per_server * group_size] * num_servers)
    return GroupSlotPool([groups_per_server] * num_servers)
