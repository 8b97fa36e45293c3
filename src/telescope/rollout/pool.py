"""Rollout workers, as the driver uses them.

Gives each group to the worker with the most free request slots, and passes on what workers report. The driver decides
which groups run and what becomes of their samples; everything between is the workers' (`rollout.worker`).

Invariant: every sample of a group that was started ends in one call of its `on_sample`, unless the pool is closed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from telescope.environments.types import PreparedPrompt
from telescope.errors import InfrastructureError
from telescope.rollout.exchange import TRAINING, GroupTask, LaneState, Orders, Report, RunningSample
from telescope.rollout.request_slots import share_slots
from telescope.rollout.sample import RolloutSettings, RolloutTask
from telescope.rollout.trajectory import Trajectory

R = TypeVar("R")

OnSample = Callable[[int, Trajectory | BaseException], None]


class Worker(Protocol):
    """Interface of a rollout worker (`rollout.worker.RolloutWorker`)."""

    async def exchange(self, orders: Orders, *, seconds: float | None = None, linger: float = 0.0) -> Report: ...


@dataclass(eq=False)
class RunningGroup:
    """A group in a worker. `samples` has the running ones, by their index."""

    task: GroupTask
    worker: _Worker
    on_sample: OnSample
    samples: dict[int, RunningSample]

    def cancel(self) -> None:
        """Ends the samples soon, with their tokens so far. Running requests are aborted in the engine."""
        self.worker.orders.cancelled.append(self.task.key)
        self.worker.has_orders.set()


@dataclass(eq=False)
class _Worker:
    """The driver's side of one worker: what it is ordered to do, and what it last reported."""

    calls: Worker
    orders: Orders = field(default_factory=Orders)
    has_orders: asyncio.Event = field(default_factory=asyncio.Event)
    lanes: dict[str, LaneState] = field(default_factory=dict)
    num_ordered: Counter[str] = field(default_factory=Counter)
    """Samples of each lane that the last report does not know."""

    def num_free(self, lane: str) -> int:
        """Returns request slots that no sample takes, not even one that is on its way there."""
        return self.lanes[lane].num_free - self.num_ordered[lane] if lane in self.lanes else 0


class RolloutPool:
    """The rollout workers of a run. Use it from one event loop. Workers are called from the first prompt or group on.

    A call of a worker waits `seconds` for news (None: as long as it takes) and `linger` seconds more.
    `on_engine_failure` is called for each failed request with its server, and closes it in all lanes if it is to get no
    more.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        seconds: float | None = None,
        linger: float = 0.0,
        on_engine_failure: Callable[[int, InfrastructureError], None] = lambda server, error: None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called for free request slots and changes of servers."""
        self.on_engine_failure = on_engine_failure
        self.workers = [_Worker(worker) for worker in workers]
        self._seconds, self._linger = seconds, linger
        self._groups: dict[int, RunningGroup] = {}
        self._keys = itertools.count()
        self._lanes: dict[str, Lane] = {}
        self._prompts: dict[int, asyncio.Future[PreparedPrompt]] = {}
        self._serving: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    def open_lane(self, name: str, capacities: list[int], group_size: int = 1) -> Lane:
        """Opens a lane with so many request slots on each server, for groups of `group_size` samples.

        All servers are closed in it.
        """
        lane = self._lanes[name] = Lane(self, name, capacities)
        for worker, shares in zip(self.workers, share_slots(capacities, len(self.workers), group_size), strict=True):
            worker.orders.lanes[name] = shares
            worker.lanes[name] = LaneState([0] * len(shares), 0)
            worker.has_orders.set()
        return lane

    def close_lane(self, name: str) -> None:
        """Ends a lane, if it is open."""
        if self._lanes.pop(name, None) is None:
            return
        for worker in self.workers:
            worker.orders.lanes[name] = None
            worker.lanes.pop(name, None)
            worker.has_orders.set()

    def start(
        self, samples: list[RolloutTask], settings: RolloutSettings, on_sample: OnSample, lane: str = TRAINING
    ) -> RunningGroup:
        """Starts the samples of one prompt. `on_sample` gets each with its index, or an error that ends the run."""
        worker = max(self.workers, key=lambda worker: worker.num_free(lane))
        task = GroupTask(next(self._keys), samples, settings, lane)
        group = RunningGroup(task, worker, on_sample, {index: RunningSample() for index in range(len(samples))})
        self._groups[task.key] = group
        worker.orders.groups.append(task)
        worker.num_ordered[lane] += len(samples)
        worker.has_orders.set()
        self._serve()
        return group

    async def run(
        self, samples: list[RolloutTask], settings: RolloutSettings, lane: str = TRAINING
    ) -> list[Trajectory]:
        """Runs the samples of one prompt to their ends, which are soon when the caller is cancelled.

        Raises errors of the run.
        """
        ends: list[asyncio.Future[Trajectory]] = [asyncio.get_running_loop().create_future() for _ in samples]

        group = self.start(samples, settings, lambda index, sample: _settle(ends[index], sample), lane)
        try:
            return await asyncio.gather(*ends)
        except BaseException:
            group.cancel()
            raise

    async def prepare(self, key: str, item: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of a dataset item. Raises `EnvironmentFailure`."""
        number = next(self._keys)
        rendered = self._prompts[number] = asyncio.get_running_loop().create_future()
        worker = min(self.workers, key=lambda worker: len(worker.orders.prompts))
        worker.orders.prompts.append((number, key, item))
        worker.has_orders.set()
        self._serve()
        try:
            return await rendered
        finally:
            self._prompts.pop(number, None)

    async def close(self) -> None:
        """Ends the calls of the workers."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    # Workers

    def _serve(self) -> None:
        """Begins to talk to the workers. Raises the error that ended this."""
        if self._failure is not None:
            raise self._failure
        if not self._serving:
            loops = [loop(each) for each in self.workers for loop in (self._order, self._listen)]
            self._serving = [asyncio.create_task(self._guarded(loop), name="rollout worker") for loop in loops]

    async def _guarded(self, loop: Coroutine[Any, Any, None]) -> None:
        """Runs a loop. Its error is one of everybody who waits for a sample or a prompt."""
        try:
            await loop
        except Exception as error:
            self._failure = self._failure or error
            for rendered in self._prompts.values():
                _settle(rendered, error)
            for group in list(self._groups.values()):
                for index in list(group.samples):
                    self._ended(group, index, error)

    async def _order(self, worker: _Worker) -> None:
        """Sends orders."""
        while True:
            await worker.has_orders.wait()
            worker.has_orders.clear()
            orders, worker.orders = worker.orders, Orders()
            report = await worker.calls.exchange(orders)
            for task in orders.groups:
                worker.num_ordered[task.lane] -= len(task.samples)
            self._read(worker, report)

    async def _listen(self, worker: _Worker) -> None:
        """Waits for news, in one call at a time. An order ends the call early."""
        while True:
            self._read(worker, await worker.calls.exchange(Orders(), seconds=self._seconds, linger=self._linger))

    def _read(self, worker: _Worker, report: Report) -> None:
        worker.lanes = report.lanes
        for (key, index), state in report.running.items():
            if key in self._groups and index in self._groups[key].samples:
                self._groups[key].samples[index] = state
        for lane, server, error in report.failures:
            self.on_engine_failure(server, error)
            if lane in self._lanes:  # the worker has closed it there
                self._lanes[lane].set_up(server, self._lanes[lane].up[server])
        for number, prompt in report.prompts:
            if number in self._prompts:  # else its caller was cancelled
                _settle(self._prompts[number], prompt)
        for key, index, sample in report.samples:
            self._ended(self._groups[key], index, sample)
        self.on_change()

    def _ended(self, group: RunningGroup, index: int, sample: Trajectory | BaseException) -> None:
        del group.samples[index]
        if not group.samples:
            del self._groups[group.task.key]
        group.on_sample(index, sample)


def _settle(future: asyncio.Future[R], outcome: R | BaseException) -> None:
    """Sets the result or the error of a future, unless its caller was cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Lane:
    """Request slots of one kind of samples, over all workers. A server is closed until it is set up."""

    def __init__(self, pool: RolloutPool, name: str, capacities: list[int]) -> None:
        self.name = name
        self.capacities = capacities
        self.up = [False] * len(capacities)
        self.pool = pool

    def set_up(self, server: int, up: bool) -> None:
        """Opens or closes a server for new requests. Running ones go on."""
        self.up[server] = up
        for worker in self.pool.workers:
            worker.orders.servers[self.name, server] = up
            worker.has_orders.set()
        self.pool.on_change()

    def close(self) -> None:
        """Ends the lane, if it has not ended. Its samples have."""
        self.pool.close_lane(self.name)

    @property
    def has_free_slot(self) -> bool:
        """Returns whether a new group would be served at once."""
        return any(worker.num_free(self.name) > 0 for worker in self.pool.workers)

    @property
    def used(self) -> list[int]:
        """Request slots in use on each server."""
        states = [worker.lanes[self.name].used for worker in self.pool.workers if self.name in worker.lanes]
        return [sum(of_server) for of_server in zip(*states, strict=True)] or [0] * len(self.capacities)

    @property
    def num_used(self) -> int:
        """Request slots in use."""
        return sum(self.used)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a request slot."""
        return sum(worker.lanes[self.name].num_waiting for worker in self.pool.workers if self.name in worker.lanes)

    @property
    def idle_share(self) -> float:
        """Share of running servers without a request, from 0 to 1."""
        used = [number for number, up in zip(self.used, self.up, strict=True) if up]
        return used.count(0) / len(used) if used else 0.0

    def describe(self) -> str:
        """Returns the state of each server, for error messages."""
        states = zip(self.up, self.used, self.capacities, strict=True)
        return ", ".join(
            f"server {i}: {'up' if up else 'down'}, {used}/{capacity} slots used"
            for i, (up, used, capacity) in enumerate(states)
        )
