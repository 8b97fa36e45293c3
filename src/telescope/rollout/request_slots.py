"""Request slots limit how many samples generate on each server at once.

Owns the counts, the choice of server and the order of waiters. Knows nothing of HTTP, Ray or tokens. A group stays on
one server so that its prompt is prefilled once. A server that is down gets no samples, and its groups move. A later
turn of a running rollout is served before a new sample.

Invariants: used >= 0 on every server, and no lease begins when used >= capacity; a lease is released exactly once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded


@dataclass(eq=False)
class Lease:
    """One request slot of one server, until released. It permits the generation of one sample there."""

    server: int
    slot: int
    released: bool = False


@dataclass
class ServerSlots:
    """The slots of one server. `up` is False while it is stopped, restarting, or without the current weights."""

    capacity: int
    up: bool = False
    used: int = 0
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_slots = list(range(self.capacity))

    @property
    def num_free(self) -> int:
        return max(self.capacity - self.used, 0)

    def resize(self, capacity: int) -> None:
        """Changes the capacity. Slots in use beyond it stay valid until released."""
        for slot in range(self.used + len(self.free_slots), capacity):
            heapq.heappush(self.free_slots, slot)
        self.capacity = capacity


@dataclass(order=True)
class _Waiter:
    priority: int
    order: int
    group: int = field(compare=False)
    future: asyncio.Future[Lease] = field(compare=False)


class RequestSlotPool:
    """Assigns request slots. Everything runs on one event loop; only `acquire` waits."""

    def __init__(self, capacities: list[int]) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when slots become free or servers change."""
        self.servers = [ServerSlots(capacity) for capacity in capacities]
        self._server_of_group: dict[int, int] = {}
        self._waiters: list[_Waiter] = []
        self._order = itertools.count()
        self._assigned_at = -math.inf
        """When a slot was last assigned, on the event loop's clock."""

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Waits for a slot; later turns go first.

        Raises DeadlineExceeded when no waiter has got a slot for `timeout` seconds. A first turn may wait far longer
        while later turns use every slot.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(-turn, next(self._order), group, loop.create_future())
        heapq.heappush(self._waiters, waiter)
        self._serve()
        began_at = loop.time()
        try:
            while not waiter.future.done():
                left = max(began_at, self._assigned_at) + timeout - loop.time()
                if left <= 0:
                    states = ", ".join(
                        f"server {i}: {'up' if s.up else 'down'}, {s.used}/{s.capacity} slots used"
                        for i, s in enumerate(self.servers)
                    )
                    raise DeadlineExceeded(
                        f"no request slot became free within {timeout:.0f} s; group {group} waits ({states})"
                    )
                await asyncio.wait({waiter.future}, timeout=left)
            return waiter.future.result()
        except BaseException:
            # Cancelled or timed out. The slot may have been assigned in the same iteration, so release it.
            if waiter.future.done() and not waiter.future.cancelled():
                RequestSlotPool.release(self, waiter.future.result())  # not self.release: subclasses release per sample
            waiter.future.cancel()
            raise

    def release(self, lease: Lease) -> None:
        """Releases a slot. Releasing the same lease twice is a bug."""
        assert not lease.released, "a request slot was released twice"
        lease.released = True
        server = self.servers[lease.server]
        server.used -= 1
        heapq.heappush(server.free_slots, lease.slot)
        self._serve()
        self.on_change()

    def is_up(self, lease: Lease) -> bool:
        """Returns whether the lease's server is open."""
        return self.servers[lease.server].up

    def set_up(self, server: int, up: bool) -> None:
        """Opens or closes a server for new leases. Existing leases stay valid until released."""
        self.servers[server].up = up
        if not up:
            self._server_of_group = {g: s for g, s in self._server_of_group.items() if s != server}
        self._serve()
        self.on_change()

    def resize(self, capacities: list[int]) -> None:
        """Changes the number of slots of each server. Groups of a server without slots move."""
        for server, capacity in zip(self.servers, capacities, strict=True):
            server.resize(capacity)
        self._server_of_group = {g: s for g, s in self._server_of_group.items() if capacities[s]}
        self._serve()
        self.on_change()

    def forget_group(self, group: int) -> None:
        """Unbinds a finished group from its server."""
        self._server_of_group.pop(group, None)

    @property
    def num_free(self) -> int:
        """Returns the number of free slots on servers that are up."""
        return sum(server.num_free for server in self.servers if server.up)

    @property
    def num_used(self) -> int:
        return sum(server.used for server in self.servers)

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.future.done() for waiter in self._waiters)

    def _serve(self) -> None:
        """Assigns free slots to waiters, by turn and then by arrival. A waiter bound to a full server keeps waiting."""
        skipped: list[_Waiter] = []
        while self._waiters:
            waiter = heapq.heappop(self._waiters)
            if waiter.future.done():
                continue
            lease = self._try_lease(waiter.group)
            if lease is None:
                skipped.append(waiter)
                if not self.num_free:
                    break
                continue
            self._assigned_at = asyncio.get_running_loop().time()
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
    """Request slots of whole groups, for `enable_individual_sample_lanes: false`.

    A group holds one slot from its first sample to its last, and all of its samples share it. Capacities count groups.
    When the server goes down, the group gets a slot on another server.
    """

    def __init__(self, capacities: list[int]) -> None:
        super().__init__(capacities)
        self._leases: dict[int, Lease] = {}
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By group, held while one of its samples acquires the slot for all."""

    async def acquire(self, group: int, *, turn: int = 0, timeout: float) -> Lease:
        """Returns the group's slot, or acquires one on a server."""
        async with self._locks[group]:
            if group in self._leases and not self.is_up(self._leases[group]):
                super().release(self._leases.pop(group))
            if group not in self._leases:
                self._leases[group] = await super().acquire(group, turn=turn, timeout=timeout)
            return replace(self._leases[group])

    def release(self, lease: Lease) -> None:
        """Ends a sample's use of the slot. The group keeps the slot until `forget_group`."""
        assert not lease.released, "a request slot was released twice"
        lease.released = True

    def forget_group(self, group: int) -> None:
        """Releases the slot of a group whose samples have ended."""
        self._locks.pop(group, None)
        if (lease := self._leases.pop(group, None)) is not None:
            super().release(lease)
        super().forget_group(group)


def share_slots(capacities: list[int], num_workers: int, group_size: int) -> list[list[int]]:
    """Divides the slots of each server [S] among workers. Returns each worker's slots on each server [W][S].

    A worker gets two servers if they have enough slots for at least two groups per worker, with shares as large as
    possible: in a small share, samples of a group wait for each other, which delays its batch. Otherwise it gets slots
    for two groups on one server, or for one group where there are too few slots for all, or none.
    """
    shares = [[0] * len(capacities) for _ in range(num_workers)]

    def users_of(capacity: int, num_groups: int) -> int:
        return min(num_workers, capacity // (num_groups * group_size))

    choices = [(num_groups, 2) for num_groups in range(max(capacities, default=0) // group_size, 1, -1)] + [(2, 1)]
    num_groups = next(
        (n for n, servers in choices if sum(users_of(each, n) for each in capacities) >= servers * num_workers), 1
    )
    first = 0
    for server, capacity in enumerate(capacities):
        if not capacity:
            continue
        num_users = min(num_workers, max(1, users_of(capacity, num_groups)))
        for user in range(num_users):
            worker = (first + user) % num_workers
            shares[worker][server] = capacity // num_users + (user < capacity % num_users)
        first += num_users
    return shares


def share_slots_by_weight(
    capacities: list[int], homes: Sequence[tuple[Sequence[int], float]], num_workers: int, group_size: int
) -> list[list[int]]:
    """Divides the slots of each server [S] among workers. Returns each worker's slots on each server [W][S].

    `homes` has the workers that run an environment and its weight. Environments that run in the same workers share
    slots by their weight, and each has at least one slot, if need be beyond the capacity.
    """
    weights: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for workers, weight in homes:
        weights[tuple(workers)] += weight
    shares, left = [[0] * len(capacities) for _ in range(num_workers)], capacities
    for number, (workers, weight) in enumerate(weights.items()):
        total = sum(list(weights.values())[number:])
        part = [round(slots * weight / total) for slots in left]
        left = [slots - own for slots, own in zip(left, part, strict=True)]
        for worker, own in zip(workers, share_slots(part, len(workers), group_size), strict=True):
            shares[worker] = [slots + more for slots, more in zip(shares[worker], own, strict=True)]
    for workers in weights:
        if any(capacities) and workers and not any(any(shares[worker]) for worker in workers):
            shares[workers[0]][capacities.index(max(capacities))] = 1
    return shares


def slots_per_server(config: TelescopeConfig) -> int:
    """Returns a server's request slots for training rollouts: samples, or groups with `GroupSlotPool`."""
    return (
        config.lanes_per_server if config.enable_individual_sample_lanes else config.max_concurrent_prompts_per_server
    )
