"""A rollout worker: runs rollouts from the prompt to the reward.

Owns running rollouts, their request slots and the choice of a server. Knows neither the run's state nor what happens to
a sample afterwards. The driver uses only `exchange` (`rollout.pool`).

A server whose request failed gets no samples of the same lane until the driver orders it to be up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from telescope.environments.types import PreparedPrompt
from telescope.errors import InfrastructureError
from telescope.inference.base import Engine
from telescope.rollout.exchange import TRAINING, GroupTask, LaneState, Orders, Report, RunningSample
from telescope.rollout.request_slots import GroupSlotPool, RequestSlotPool
from telescope.rollout.sample import Environments, Rollout, RolloutTask
from telescope.rollout.sample_rows import encode_rows
from telescope.sandbox.activity import SAMPLE

MANY_EVENTS = 32
"""Number of events at which a report waits no longer."""


@dataclass(eq=False)
class _Group:
    task: GroupTask
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Running samples, by their index."""


class RolloutWorker:
    """Runs rollouts with `environments` and `engines`, the inference servers in order.

    With `grouped`, a training slot belongs to a whole group (`request_slots.GroupSlotPool`).
    """

    def __init__(self, environments: Environments, engines: Sequence[Engine], *, grouped: bool = False) -> None:
        self.lanes: dict[str, RequestSlotPool] = {}
        self._environments = environments
        self._engines = engines
        self._grouped = grouped
        self._groups: dict[int, _Group] = {}
        self._report = Report()
        self._reported_at = -math.inf
        """Time of the last report, on the event loop's clock."""
        self._moved: set[tuple[int, int]] = set()
        """Running samples with a new request or turn since the last report."""
        self._is_slot_free = False
        """A request slot was released since the last report."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_exchanges = 0
        self._warned: set[str] = set()

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        """Applies orders and returns the events since the last report.

        Waits up to `seconds` for an event (None: without limit), and then for more until the last report was `interval`
        seconds ago. A newer exchange ends the wait of an older one.
        """
        self._num_exchanges += 1
        number = self._num_exchanges
        self._changed.set()
        self._apply(orders)
        await asyncio.sleep(0)  # new samples take their slots
        if orders.is_empty:
            await self._events(number, 1, seconds)
            now = asyncio.get_running_loop().time()
            await self._events(number, MANY_EVENTS, self._reported_at + interval - now)
        self._reported_at = asyncio.get_running_loop().time()
        report, self._report, self._is_slot_free = self._report, Report(), False
        report.rows = encode_rows(report.trajectories, self._warned)
        for sample in report.trajectories:
            sample.fold()
        report.running, report.is_stuck = self._news_of_running(), self._environments.is_stuck
        report.lanes = {
            name: LaneState([server.used for server in slots.servers], slots.num_free)
            for name, slots in self.lanes.items()
        }
        return report

    async def close(self) -> None:
        """Cancels all rollouts. Requests in the engines end with their connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _events(self, number: int, enough: int, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._report.num_events + self._is_slot_free < enough and self._num_exchanges == number:
                    self._changed.clear()
                    await self._changed.wait()

    def _apply(self, orders: Orders) -> None:
        for name, capacities in orders.lanes.items():
            if capacities is None:
                self.lanes.pop(name, None)
            elif name in self.lanes:
                self.lanes[name].resize(capacities)
            else:
                slots = GroupSlotPool if self._grouped and name == TRAINING else RequestSlotPool
                self.lanes[name] = slots(capacities)
                self.lanes[name].on_change = self._slots_changed
        for (name, server), up in orders.servers.items():
            if name in self.lanes:
                self.lanes[name].set_up(server, up)
        for number, key, item in orders.prompts:
            self._spawn(self._prepare(number, key, item))
        for task in orders.groups:
            group = self._groups[task.key] = _Group(task)
            for index, sample in task.samples.items():
                group.rollouts[index] = rollout = self._rollout(group, index, sample)
                self._spawn(self._run(group, index, rollout))
        for cancelled in orders.cancelled:
            self._cancel(cancelled)

    def _slots_changed(self) -> None:
        self._is_slot_free = True
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, number: int, key: str, item: int) -> None:
        prompt: PreparedPrompt | Exception
        try:
            prompt = await self._environments.prepare(key, item)
        except Exception as error:  # passed to the caller, who waits for the prompt
            prompt = error
        self._report.prompts.append((number, prompt))
        self._changed.set()

    def _rollout(self, group: _Group, index: int, sample: RolloutTask) -> Rollout:
        task = group.task
        return Rollout(
            sample,
            slot_key=task.key,
            # The lane of a group that was cancelled before it was sent may be closed.
            slots=self.lanes.get(task.lane, RequestSlotPool([])),
            engine_of=lambda server: self._engines[server],
            environments=self._environments,
            settings=task.settings,
            on_engine_failure=lambda server, error: self._engine_failed(task.lane, server, error),
            on_progress=lambda: self._moved.add((task.key, index)),
        )

    async def _run(self, group: _Group, index: int, rollout: Rollout) -> None:
        SAMPLE.set(rollout.task.sample_id)
        key = group.task.key
        ended: Any
        try:
            ended = await rollout.run()
        except Exception as error:  # an error of the run, which the driver raises
            ended = error
        del group.rollouts[index]
        if not group.rollouts:
            del self._groups[key]
            if group.task.lane in self.lanes:
                self.lanes[group.task.lane].forget_group(key)
        self._report.samples.append((key, index, ended))
        self._changed.set()

    def _news_of_running(self) -> dict[tuple[int, int], RunningSample]:
        news = {}
        for key, index in self._moved:
            if key in self._groups and (rollout := self._groups[key].rollouts.get(index)) is not None:
                sample = rollout.trajectory
                news[key, index] = RunningSample(
                    sample.server_index, sample.slot, sample.started_at, rollout.oldest_version(),
                    sample.num_sampled_tokens - sum(rollout.task.lost),
                )  # fmt: skip
        self._moved.clear()
        return news

    def _cancel(self, key: int) -> None:
        if (group := self._groups.get(key)) is None:
            return
        requests: dict[int, list[str]] = defaultdict(list)
        for rollout in group.rollouts.values():
            for server, request_id in rollout.cancel():
                requests[server].append(request_id)
        for server, ids in requests.items():
            self._spawn(self._abort(group.task.lane, server, ids))

    async def _abort(self, lane: str, server: int, request_ids: list[str]) -> None:
        try:
            await self._engines[server].abort(request_ids)
        except InfrastructureError as error:
            self._engine_failed(lane, server, error)

    def _engine_failed(self, lane: str, server: int, error: InfrastructureError) -> None:
        if lane in self.lanes:
            self.lanes[lane].set_up(server, False)
        self._report.failures.append((lane, server, error))
        self._changed.set()
