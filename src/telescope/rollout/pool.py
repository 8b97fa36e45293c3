"""The driver's view of the rollout workers.

Gives each group to the worker with the most free request slots, and passes on what workers report. The driver decides
which groups run and what happens to their samples; everything in between belongs to the workers (`rollout.worker`).

Invariant: each sample of a started group ends in exactly one call of its `on_sample`, unless the pool is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from telescope.environments.types import ROLLOUT_ERROR, EnvironmentInfo, PreparedPrompt
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.exchange import TRAINING, GroupTask, LaneState, Orders, Report, RunningSample, WorkerLost
from telescope.rollout.request_slots import share_slots_by_weight
from telescope.rollout.sample import RolloutSettings, RolloutTask
from telescope.rollout.sample_rows import assign_rows
from telescope.rollout.trajectory import Trajectory

MAX_LOST_WORKERS = 3
"""Lost workers after which the group that they ran, or the prompt that they rendered, counts as the cause. A group that
may be the cause at its next loss runs while no other such group does, so that only one group is blamed."""

R = TypeVar("R")

OnSample = Callable[[int, Trajectory | BaseException], None]


class Worker(Protocol):
    """Interface of a rollout worker (`rollout.worker.RolloutWorker`)."""

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        """Sends orders and returns a report. Raises `WorkerLost`."""

    async def restart(self) -> None:
        """Restarts the worker after `WorkerLost`, without rollouts and lanes. Raises when it cannot."""


@dataclass(eq=False)
class RunningGroup:
    """A group that runs in a worker or waits for one. `samples` has the running samples by index."""

    task: GroupTask
    on_sample: OnSample
    samples: dict[int, RunningSample]
    pool: RolloutPool
    worker: _Worker | None = None
    is_cancelled: bool = False
    num_lost: int = 0
    """Workers that were lost while they ran it."""

    def cancel(self) -> None:
        """Ends the samples soon and keeps their tokens so far. Running requests are aborted in the engine."""
        self.is_cancelled = True
        if self.worker is not None:
            self.worker.orders.cancelled.append(self.task.key)
            self.worker.has_orders.set()
        else:
            self.pool._end(self, WorkerLost("cancelled"))  # it waits for a worker


@dataclass(eq=False)
class _Worker:
    """The driver's state of one worker: its pending orders and its last report."""

    calls: Worker
    orders: Orders = field(default_factory=Orders)
    has_orders: asyncio.Event = field(default_factory=asyncio.Event)
    lanes: dict[str, LaneState] = field(default_factory=dict)
    num_ordered: Counter[str] = field(default_factory=Counter)
    """Samples ordered in each lane and not yet in a report."""
    num_groups: int = 0
    shares: dict[str, list[int]] = field(default_factory=dict)
    """Its request slots on each server in each open lane."""
    is_open: bool = True
    """Whether it gets new groups: it is neither starting nor about to be replaced."""

    def num_free(self, lane: str) -> int:
        """Returns the request slots that no sample uses, including samples that are still on their way there."""
        if not self.is_open or lane not in self.lanes:
            return 0
        return self.lanes[lane].num_free - self.num_ordered[lane]


class RolloutPool:
    """The rollout workers of a run. Use it from one event loop. Calls to workers begin with the first prompt or group.

    `homes` returns the workers that can run an environment now, by its key; without it, all can. A call to a worker
    waits up to `seconds` for an event (None: without limit), and then until `interval` seconds after its last report.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        infos: Mapping[str, EnvironmentInfo] | None = None,
        seconds: float | None = None,
        interval: float = 0.0,
        homes: Callable[[str], Iterable[int]] | None = None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when request slots become free or servers change."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called when a request of a sample begins or ends."""
        self.on_engine_failure: Callable[[int, InfrastructureError], None] = lambda server, error: None
        """Called with the server of each failed request. Closes it in all lanes if it is to get no more requests."""
        self.homes = homes or (lambda key: range(len(workers)))
        self.infos = infos or {}
        """Descriptions of the environments, by their keys."""
        self.workers = [_Worker(worker) for worker in workers]
        self._seconds, self._interval = seconds, interval
        self._groups: dict[int, RunningGroup] = {}
        self._keys = itertools.count()
        self.lanes: dict[str, Lane] = {}
        self._suspects: deque[RunningGroup] = deque()
        """Groups that may have crashed their workers. Only the first one runs."""
        self._prompts: dict[int, tuple[_Worker, asyncio.Future[PreparedPrompt | None]]] = {}
        """The worker of each prompt that is rendered, and the result: None if the prompt must be sent again."""
        self._serving: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    def open_lane(
        self,
        name: str,
        capacities: list[int],
        group_size: int = 1,
        *,
        servers: Collection[int] | None = None,
        keys: Iterable[tuple[str, float]] = (),
    ) -> Lane:
        """Opens a lane with the given request slots on each server, for groups of `group_size` samples.

        Only `servers` will serve it, by default all. They are closed at first. `keys` are the environments of its
        samples with their weights, if they are known.
        """
        lane = self.lanes[name] = Lane(self, name, capacities, group_size, keys)
        for worker in self.workers:
            worker.lanes[name] = LaneState([0] * len(capacities), 0)
        lane.share_slots_of(range(len(capacities)) if servers is None else servers)
        return lane

    def start(
        self, samples: list[RolloutTask], settings: RolloutSettings, on_sample: OnSample, lane: str = TRAINING
    ) -> RunningGroup:
        """Starts the samples of one prompt. `on_sample` gets each with its index, or an error that ends the run."""
        tasks = dict(enumerate(samples))
        task = GroupTask(next(self._keys), tasks, settings, lane)
        group = RunningGroup(task, on_sample, {index: RunningSample() for index in tasks}, self)
        self._groups[task.key] = group
        self._assign(group)
        self._serve_all()
        return group

    def _assign(self, group: RunningGroup) -> None:
        """Gives a group to the worker with the most free slots, and to one without any only if there is no other."""
        task = group.task
        key = next(iter(task.samples.values())).environment_key
        homes = [self.workers[index] for index in self.homes(key)]
        # If no worker is open, one of them starts this group once it is back.
        group.worker = worker = max(
            homes, key=lambda each: (each.is_open, any(each.shares.get(task.lane, ())), each.num_free(task.lane))
        )
        worker.num_groups += 1
        worker.orders.groups.append(task)
        worker.num_ordered[task.lane] += len(task.samples)
        worker.has_orders.set()

    async def run(
        self, samples: list[RolloutTask], settings: RolloutSettings, lane: str = TRAINING
    ) -> list[Trajectory]:
        """Runs the samples of one prompt to their ends. Cancels them when the caller is cancelled.

        Raises errors of the run.
        """
        ends: list[asyncio.Future[Trajectory]] = [asyncio.get_running_loop().create_future() for _ in samples]

        group = self.start(samples, settings, lambda index, sample: _settle(ends[index], sample), lane)
        try:
            return await asyncio.gather(*ends)
        except BaseException:
            group.cancel()
            raise

    async def describe(self, key: str) -> EnvironmentInfo:
        return self.infos[key]

    async def prepare(self, key: str, item: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of a dataset item. Raises `EnvironmentFailure`."""
        number = next(self._keys)
        losses: list[WorkerLost] = []
        while len(losses) < MAX_LOST_WORKERS:
            self._serve_all()
            # The one with the fewest groups, because a prompt waits for the user code of their samples.
            worker = min(self.workers, key=lambda each: (not each.is_open, len(each.orders.prompts), each.num_groups))
            worker.orders.prompts.append((number, key, item))
            worker.has_orders.set()
            self._prompts[number] = worker, asyncio.get_running_loop().create_future()
            try:
                if (prompt := await self._prompts[number][1]) is not None:
                    return prompt
            except WorkerLost as error:
                losses.append(error)
            finally:
                del self._prompts[number]
        what = f"{len(losses)} rollout workers ended while they rendered the prompt; the last one: {losses[-1]}"
        raise EnvironmentFailure(f"environment {key!r}, item {item}: {what}")

    async def close(self) -> None:
        """Stops calling the workers."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    # Workers

    def _serve_all(self) -> None:
        """Starts calling the workers, once. Raises the error that ended the calls."""
        if self._failure is not None:
            raise self._failure
        if not self._serving:
            self._serving = [asyncio.create_task(self._serve(each), name="rollout worker") for each in self.workers]

    async def _serve(self, worker: _Worker) -> None:
        """Calls a worker, and restarts it when it is lost. Any other error is raised to everyone who waits."""
        try:
            while True:
                try:
                    async with asyncio.TaskGroup() as calls:
                        calls.create_task(self._order(worker))
                        calls.create_task(self._listen(worker))
                except* WorkerLost as lost:
                    self._lose(worker, lost.exceptions[0])
                await worker.calls.restart()
                self._lose(worker, WorkerLost("cancelled"))  # it may no longer be able to run what it got meanwhile
                for lane in self.lanes.values():  # it may be on another node, so that other workers run an environment
                    lane.share_slots_of(lane.servers)
                for name in worker.shares:
                    for server, up in enumerate(self.lanes[name].up):
                        worker.orders.servers[name, server] = up
                worker.is_open = True
                worker.has_orders.set()
        except Exception as error:
            failure = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._failure = self._failure or failure
            for _, rendered in self._prompts.values():
                _settle(rendered, failure)
            for group in list(self._groups.values()):
                for index in list(group.samples):
                    self._ended(group, index, failure)

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """Gives the prompts and groups of a lost worker to others. Its ended samples have arrived already."""
        unsent = {task.key for task in worker.orders.groups}
        waiting = {number for number, *_ in worker.orders.prompts}
        worker.orders, worker.is_open = Orders(), False
        worker.lanes, worker.num_ordered, worker.num_groups = {}, Counter(), 0
        lost = {n: rendered for n, (at, rendered) in self._prompts.items() if at is worker and not rendered.done()}
        # It renders one prompt after the other, so only the first that was sent can be the cause.
        cause = next((number for number in lost if number not in waiting), None)
        for number, rendered in lost.items():
            _settle(rendered, error if number == cause else None)
        for group in [group for group in self._groups.values() if group.worker is worker]:
            group.worker = None
            tasks = {index: group.task.samples[index] for index in group.samples}
            if group.task.key not in unsent:
                group.num_lost += 1
                for index, state in group.samples.items():
                    tasks[index] = replace(tasks[index], lost=(*tasks[index].lost, state.num_tokens))
            group.samples = {index: RunningSample() for index in tasks}
            group.task.samples = tasks
            if group.is_cancelled or group.num_lost >= MAX_LOST_WORKERS:
                self._end(group, error)
            elif group.num_lost < MAX_LOST_WORKERS - 1:
                self._assign(group)
            else:
                if group not in self._suspects:
                    self._suspects.append(group)
                self._assign_suspect()
        self.on_change()

    def _assign_suspect(self) -> None:
        """Assigns the first suspect group, if it waits."""
        if self._suspects and self._suspects[0].worker is None:
            self._assign(self._suspects[0])

    def _end(self, group: RunningGroup, error: Exception) -> None:
        """Ends the samples of a group that no worker runs."""
        for index in list(group.samples):
            self._ended(group, index, _lost_sample(group, index, error))

    async def _order(self, worker: _Worker) -> None:
        while True:
            await worker.has_orders.wait()
            worker.has_orders.clear()
            orders, worker.orders = worker.orders, Orders()
            report = await worker.calls.exchange(orders)
            for task in orders.groups:
                worker.num_ordered[task.lane] -= len(task.samples)
            self._read(worker, report)

    async def _listen(self, worker: _Worker) -> None:
        """Waits for events, one call at a time. An order ends the call early."""
        while True:
            self._read(worker, await worker.calls.exchange(Orders(), seconds=self._seconds, interval=self._interval))
            if not (worker.is_open or worker.num_groups):
                raise WorkerLost("user code of an ended sample still runs in it")

    def _read(self, worker: _Worker, report: Report) -> None:
        worker.lanes = report.lanes
        worker.is_open = not report.is_stuck
        for (key, index), state in report.running.items():
            if key in self._groups and index in self._groups[key].samples:
                self._groups[key].samples[index] = state
                self.on_progress()
        for lane, server, error in report.failures:
            self.on_engine_failure(server, error)
            if lane in self.lanes:  # the worker has closed the server in this lane
                self.lanes[lane].set_up(server, self.lanes[lane].up[server])
        for number, prompt in report.prompts:
            if number in self._prompts:  # otherwise its caller was cancelled
                _settle(self._prompts[number][1], prompt)
        assign_rows(report.trajectories, report.rows)
        for key, index, sample in report.samples:
            if key in self._groups:  # otherwise the failure of another worker has ended it
                self._ended(self._groups[key], index, sample)
        self.on_change()

    def _ended(self, group: RunningGroup, index: int, sample: Trajectory | BaseException) -> None:
        del group.samples[index]
        if not group.samples:
            del self._groups[group.task.key]
            if group.worker is not None:
                group.worker.num_groups -= 1
            if group in self._suspects:
                self._suspects.remove(group)
                self._assign_suspect()
        group.on_sample(index, sample)


def _settle(future: asyncio.Future[R], outcome: R | BaseException) -> None:
    """Sets a future's result or error, unless its caller was cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Lane:
    """The request slots for one kind of samples, over all workers. A server is closed until it is set up."""

    def __init__(
        self, pool: RolloutPool, name: str, capacities: list[int], group_size: int, keys: Iterable[tuple[str, float]]
    ) -> None:
        self.name = name
        self.capacities = capacities
        self.group_size = group_size
        self.keys = list(keys)
        self.servers: Collection[int] = ()
        """Servers that may serve the lane."""
        self.up = [False] * len(capacities)
        self.pool = pool

    def share_slots_of(self, servers: Collection[int]) -> None:
        """Divides the slots of the servers that may serve the lane among the workers that run its environments.

        Running requests continue.
        """
        self.servers = servers
        capacities = [slots if server in servers else 0 for server, slots in enumerate(self.capacities)]
        workers, chosen = self.pool.workers, itertools.cycle(servers)
        homes = [(list(self.pool.homes(key)), weight) for key, weight in self.keys] or [
            (list(range(len(workers))), 1.0)
        ]
        divided = share_slots_by_weight(capacities, homes, len(workers), self.group_size)
        for worker, shares in zip(workers, divided, strict=True):
            if servers and not any(shares) and any(worker.shares.get(self.name, ())):
                shares[next(chosen)] = 1  # beyond the capacity, because samples may wait in this worker
            worker.orders.lanes[self.name] = worker.shares[self.name] = shares
            worker.has_orders.set()

    def set_up(self, server: int, up: bool) -> None:
        """Opens or closes a server for new requests. Running requests continue."""
        self.up[server] = up
        for worker in self.pool.workers:
            worker.orders.servers[self.name, server] = up
            worker.has_orders.set()
        self.pool.on_change()

    def close(self) -> None:
        """Ends the lane, if it is open. Call it after its samples have ended."""
        if self.pool.lanes.pop(self.name, None) is None:
            return
        for worker in self.pool.workers:
            worker.orders.lanes[self.name] = None
            worker.lanes.pop(self.name, None)
            worker.shares.pop(self.name, None)
            worker.has_orders.set()

    def has_free_slot(self, key: str) -> bool:
        """Returns whether a new group of an environment would get a slot at once."""
        return any(self.pool.workers[index].num_free(self.name) > 0 for index in self.pool.homes(key))

    @property
    def used(self) -> list[int]:
        """Returns the number of request slots in use on each server."""
        states = [worker.lanes[self.name].used for worker in self.pool.workers if self.name in worker.lanes]
        return [sum(of_server) for of_server in zip(*states, strict=True)] or [0] * len(self.capacities)

    @property
    def num_used(self) -> int:
        return sum(self.used)

    @property
    def idle_share(self) -> float:
        """Returns the share of running servers without a request, from 0 to 1."""
        used = [number for number, up in zip(self.used, self.up, strict=True) if up]
        return used.count(0) / len(used) if used else 0.0


def _lost_sample(group: RunningGroup, index: int, error: Exception) -> Trajectory:
    """Returns a sample that ended with its worker: as cancelled, or as an environment failure."""
    task = group.task.samples[index]
    sample = Trajectory(
        task.sample_id, task.group_id, task.sample_index, task.environment, started_at=time.time(),
        finished_at=time.time(), cancelled=group.is_cancelled, lost_conversations=list(task.lost),
        num_infrastructure_retries=len(task.lost),
    )  # fmt: skip
    if not group.is_cancelled:
        sample.failure_kind, sample.end_reason = "environment", ROLLOUT_ERROR
        sample.failure_message = (
            f"environment {task.environment_key!r}, item {task.item_index}: {group.num_lost} rollout workers ended "
            f"while they ran its group; the last one: {error}"
        )
    return sample
