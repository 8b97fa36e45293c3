"""Scheduling of calls: their workers, their deadlines, and blame for exits.

Pure bookkeeping without processes, clocks or tasks: the pool drives it. The rules:

- First come, first served. A call that runs again goes to the front. A call that only one worker can run goes before
  those that any worker can run.
- A worker receives a second call before it has answered the first only while all its calls together are expected to
  take less than `AHEAD_SECONDS`. So cheap calls are pipelined, and an expensive one waits in the pool for the first
  free worker.
- Calls queued behind a slow one go to other workers, unless they belong to a rollout: a turn must not run twice.
- A call's deadline counts the time in which it could have made progress: not while it is queued, and not while another
  call occupies the worker's main thread.
- When a worker ends, the call on its main thread fails, unless a signal from outside ended the worker. All other calls
  run again elsewhere, except those of a rollout that had begun there: its state is lost, and its caller begins again.
- When all workers end together with the fork server, every call runs again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from telescope.errors import EnvironmentFailure

if TYPE_CHECKING:
    from telescope.rollout.worker_pool.worker_handle import PoolWorker

AHEAD_SECONDS = 0.02
"""Expected work queued in one worker. Longer than a slow iteration of the driver's event loop, so that workers do not
idle, and short enough not to delay a call noticeably."""

MAX_QUEUED = 64
MAX_PARKED = 1024
"""Calls of one worker that wait in its event loop, mostly for other services."""

MAX_WORKER_EXITS = 3
"""Workers that may end around a call without a known cause before the call itself fails."""

UNKNOWN_COST = 0.02
"""Seconds assumed for a kind of call that was never measured, which makes such calls run one at a time."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of the driver. `header` has no id: each dispatch gets a new one."""

    header: dict[str, Any]
    blob: bytes
    future: asyncio.Future[tuple[dict[str, Any], bytes]]
    label: str
    """Name of the call in errors."""
    used_seconds: float = 0.0
    worker_exits: int = 0
    expected_seconds: float = UNKNOWN_COST
    timeout_seconds: float | None = None
    """Deadline of this call; None: the pool's."""
    worker: Any = None
    """The only worker that can run it, because its rollout or its resources are there."""
    rollout: Rollout | None = None
    """The multi-turn rollout that it belongs to. Its first call has no worker, and begins the rollout on any worker."""

    @property
    def kind(self) -> tuple[int, str]:
        """Key of the cost estimate: (environment, operation)."""
        return self.header["env"], self.header["op"]

    def limit(self, timeout_seconds: float) -> float:
        """Returns its deadline in seconds, by default the pool's `timeout_seconds`."""
        return timeout_seconds if self.timeout_seconds is None else self.timeout_seconds


@dataclass(slots=True, eq=False)
class Rollout:
    """A multi-turn rollout. `worker` is the worker with its state, once its first call was sent.

    `key` identifies it in the worker; unlike the id that its caller chose, it is never reused.
    """

    key: int
    label: str
    worker: Any = None
    lost: str | None = None
    """How its worker ended, if the state was lost with it."""


@dataclass(slots=True)
class Costs:
    """Smoothed main-thread seconds of each kind of call."""

    _seconds: dict[tuple[int, str], float] = field(default_factory=dict)

    def expected(self, kind: tuple[int, str]) -> float:
        return self._seconds.get(kind, UNKNOWN_COST)

    def measured(self, kind: tuple[int, str], seconds: float) -> None:
        """Updates the estimate of a call's seconds.

        It rises fast and falls slowly, so that one expensive call in ten keeps queues short.
        """
        before = self._seconds.get(kind, seconds)
        share = 0.5 if seconds > before else 0.1
        self._seconds[kind] = before + share * (seconds - before)


class ExitCause(Enum):
    """Why a worker's process ended, which decides whether a call caused it."""

    BY_ITSELF = auto()
    """By itself: the code that it ran ended it."""
    BY_POOL = auto()
    """The pool killed it, and has already failed the call responsible."""
    WITH_SERVER = auto()
    """Together with the fork server, which a call of any worker may have killed."""
    BY_SIGNAL = auto()
    """By a signal from outside. A call causes that only by exhausting memory (the kernel's OOM killer)."""


@dataclass(slots=True)
class WorkerState:
    """The calls and rollouts of one worker. Call ids are those of dispatches, in rising order."""

    queued: dict[int, Call] = field(default_factory=dict)
    """Sent and not started, or on the main thread now, in order of sending."""
    parked: dict[int, Call] = field(default_factory=dict)
    """Waiting in the worker's event loop."""
    expected_seconds: float = 0.0
    unowned_seconds: float = 0.0
    """Time for which a call that is no longer in this state has occupied the main thread."""
    last_reading: tuple[int, int] = (0, 0)
    busy_seconds: float = 0.0
    """Time for which the current call has occupied the main thread without a break."""
    num_rollouts: int = 0
    """Multi-turn rollouts whose state is in this worker."""

    @property
    def num_calls(self) -> int:
        return len(self.queued) + len(self.parked)

    def admits(self, expected_seconds: float) -> bool:
        """Returns whether a call with this expected cost may be sent now."""
        if len(self.parked) >= MAX_PARKED:
            return False
        if not self.queued:
            return True
        return len(self.queued) < MAX_QUEUED and self.expected_seconds + expected_seconds <= AHEAD_SECONDS

    def sent(self, call_id: int, call: Call) -> None:
        self.queued[call_id] = call
        self.expected_seconds += call.expected_seconds

    def park(self, call_id: int) -> Call | None:
        """Moves a call from the main thread to the event loop. Returns None if it was withdrawn before."""
        call = self._unqueue(call_id)
        if call is not None:
            self.parked[call_id] = call
        return call

    def answered(self, call_id: int) -> Call | None:
        """Removes a finished call. Returns None if it was withdrawn before."""
        return self.parked.pop(call_id, None) or self._unqueue(call_id)

    def _unqueue(self, call_id: int) -> Call | None:
        call = self.queued.pop(call_id, None)
        if call is not None:
            self.expected_seconds = max(0.0, self.expected_seconds - call.expected_seconds) if self.queued else 0.0
        return call

    def charge(self, reading: tuple[int, int], seconds: float) -> None:
        """Charges `seconds` to the calls that could run. `reading` is the slot's `(current, entries)` at their end."""
        current, _ = reading
        stuck = current != 0 and reading == self.last_reading
        self.last_reading = reading
        self.busy_seconds = self.busy_seconds + seconds if stuck else 0.0
        if stuck:
            owner = self.queued.get(current) or self.parked.get(current)
            if owner is None:
                self.unowned_seconds += seconds
            else:
                owner.used_seconds += seconds
            return
        self.unowned_seconds = 0.0
        for call in self.parked.values():
            call.used_seconds += seconds
        if current in self.queued:
            self.queued[current].used_seconds += seconds
        elif current == 0 and not self.parked and self.queued:
            next(iter(self.queued.values())).used_seconds += seconds

    def overdue(self, timeout_seconds: float) -> list[tuple[int, Call]]:
        """Returns calls whose deadline has passed, with their ids."""
        calls = (*self.queued.items(), *self.parked.items())
        return [(call_id, call) for call_id, call in calls if call.used_seconds >= call.limit(timeout_seconds)]

    def is_waiting(self, call_id: int) -> bool:
        """Returns whether the call waits off the main thread."""
        return call_id in self.parked and self.last_reading[0] != call_id

    def withdraw_queued(self) -> dict[int, Call]:
        """Removes and returns the calls behind the one on the main thread.

        The worker may start one of them before it receives the withdrawal, and then it runs twice. So calls that change
        a rollout's state, or that only this worker can run, stay.
        """
        current = self.last_reading[0]
        withdrawn = {
            call_id: call
            for call_id, call in self.queued.items()
            if call_id > current and call.rollout is None and call.worker is None
        }
        for call_id in withdrawn:
            self._unqueue(call_id)
        return withdrawn

    def worker_ended(self, reading: tuple[int, int], cause: ExitCause) -> tuple[Call | None, list[Call]]:
        """Empties the state when the worker has ended. Returns the call that caused it, if any, and the others in
        order.

        If the pool killed the worker, no call is charged. If it ended with the fork server, every started call is
        charged. Otherwise the call on the main thread caused the end; after a signal from outside it is only charged,
        and runs again. With no call on the main thread, the cause may be a call in the event loop (through a thread or
        a subprocess) or the first in the queue, whose answer was being sent, so each of these is charged.
        """
        current, _ = reading
        running = self.queued.get(current) or self.parked.get(current)
        culprit = None
        if running is not None and cause is ExitCause.BY_ITSELF:
            culprit = running
        elif running is not None and cause is ExitCause.BY_SIGNAL:
            running.worker_exits += 1
        elif cause is not ExitCause.BY_POOL:
            first = current if current or cause is ExitCause.WITH_SERVER else next(iter(self.queued), 0)
            begun = [*self.parked.values(), *([self.queued[first]] if first in self.queued else [])]
            for call in begun:
                call.worker_exits += 1
        calls = sorted({**self.queued, **self.parked}.items(), key=lambda item: item[0])
        others = [call for _, call in calls if call is not culprit]
        self.queued.clear()
        self.parked.clear()
        self.expected_seconds = self.unowned_seconds = self.busy_seconds = 0.0
        self.last_reading = (0, 0)
        return culprit, others


class CallQueue:
    """`len` counts the waiting calls, cancelled ones included."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._anywhere: deque[Call] = deque()
        self._at: defaultdict[Any, deque[Call]] = defaultdict(deque)
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._anywhere) + sum(map(len, self._at.values()))

    def add(self, call: Call) -> None:
        self._line(call).append(call)

    def _line(self, call: Call) -> deque[Call]:
        return self._anywhere if call.worker is None else self._at[call.worker]

    def withdraw_rollout_calls(self, worker: Any) -> list[Call]:
        """Removes and returns the rollout calls that wait for a worker."""
        line = self._at[worker]
        withdrawn = [call for call in line if call.rollout is not None]
        self._at[worker] = deque(call for call in line if call.rollout is None)
        return withdrawn

    def requeue(self, calls: Sequence[Call]) -> None:
        """Puts calls back at the front, in order. A call around which too many workers ended fails instead."""
        for call in reversed(calls):
            if call.future.done():
                continue
            call.used_seconds = 0.0
            if call.worker is None and call.rollout is not None:
                unbind(call.rollout)  # it begins again, on any worker
            if call.worker_exits >= MAX_WORKER_EXITS:
                call.future.set_exception(
                    EnvironmentFailure(f"{call.label} failed: its process ended {call.worker_exits} times while it ran")
                )
            else:
                self._line(call).appendleft(call)

    def dispatch(self, workers: Iterable[PoolWorker]) -> Iterator[tuple[PoolWorker, int, Call]]:
        """Assigns waiting calls in order to the least loaded workers with capacity.

        Yields the worker, the id of the dispatch and the call, which the caller must send.
        """
        candidates = list(workers)
        for worker in candidates:
            while (call := self._first(self._at[worker])) is not None and self._admits(worker, call):
                yield self._assign(worker, self._at[worker])
        while (call := self._first(self._anywhere)) is not None and candidates:
            begins = call.rollout is not None
            worker = min(candidates, key=lambda p: (p.state.num_rollouts if begins else 0, *_load(p.state)))
            if self._admits(worker, call):
                yield self._assign(worker, self._anywhere)
            else:
                candidates.remove(worker)

    def _first(self, line: deque[Call]) -> Call | None:
        """Returns the first call of a line that is not cancelled."""
        while line and line[0].future.done():
            line.popleft()
        return line[0] if line else None

    def _admits(self, worker: PoolWorker, call: Call) -> bool:
        call.expected_seconds = self.costs.expected(call.kind)
        return worker.state.admits(call.expected_seconds)

    def _assign(self, worker: PoolWorker, line: deque[Call]) -> tuple[PoolWorker, int, Call]:
        call = line.popleft()
        self._last_id += 1
        worker.state.sent(self._last_id, call)
        if call.rollout is not None and call.rollout.worker is None:
            call.rollout.worker = worker
            worker.state.num_rollouts += 1
        return worker, self._last_id, call

    def fail(self, error: Exception) -> None:
        """Fails every waiting call with `error`."""
        for line in (self._anywhere, *self._at.values()):
            for call in line:
                if not call.future.done():
                    call.future.set_exception(error)
            line.clear()


def unbind(rollout: Rollout) -> None:
    """Unbinds a rollout from its worker."""
    if rollout.worker is not None:
        rollout.worker.state.num_rollouts -= 1
        rollout.worker = None


def _load(state: WorkerState) -> tuple[float, int, int]:
    """Sort key of how busy a worker is."""
    return state.expected_seconds, len(state.queued), state.num_calls
