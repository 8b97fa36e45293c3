"""Which call runs in which worker, whose deadline is running, and who is to blame for a death.

Pure bookkeeping without processes, clocks or tasks: the pool drives it. The rules:

- A worker is given a second call before it has answered the first only while all that it holds is expected to take
  less than `AHEAD_SECONDS`; so cheap calls are pipelined, and an expensive one waits at the pool where any worker that
  falls free can take it.
- Calls behind a slow one go elsewhere, unless they belong to a rollout: a turn must not be played twice.
- A call's deadline counts the time in which it could have made progress: not while it is queued, and not while another
  call holds the worker's main thread.
- When a worker dies, the call that held its main thread is to blame, unless a signal from outside ended the worker. All
  others run again elsewhere, but for those of a rollout that had begun there: its state is gone, and it is for the
  caller to begin it again.
- When all workers die with the process that they were forked from, everything runs again.

Calls that wait for a worker, and which of them goes where next.

Owns the order of the calls, their expected costs and the ids of dispatches. Knows no processes: a place that a call can
go to is whatever has a `WorkerState`. First come, first served; a call that has to run again goes to the front;
a call that can run in one place only waits for that place, and there goes before those that can run anywhere.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from telescope.errors import EnvironmentFailure

AHEAD_SECONDS = 0.02
"""Expected work that a worker may hold. Longer than a slow turn of the driver's event loop, so that workers do not run
dry; shorter than anyone would notice as a delay."""

MAX_QUEUED = 64
MAX_PARKED = 1024
"""Calls of one worker that wait in its event loop: connections to other services, mostly."""

MAX_DEATHS = 3
"""Workers that may die around a call, nobody being to blame, before the call itself is given up."""

UNKNOWN_COST = 0.02
"""Seconds assumed of a kind of call that was never measured: one at a time."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of the driver. `header` has no id yet: each dispatch gets its own."""

    header: dict[str, Any]
    blob: bytes
    future: asyncio.Future[tuple[dict[str, Any], bytes]]
    label: str
    """Names the call in errors."""
    used_seconds: float = 0.0
    deaths: int = 0
    expected_seconds: float = UNKNOWN_COST
    timeout_seconds: float | None = None
    """A deadline of its own; None: that of the pool."""
    place: Any = None
    """The only place where it can run: where its rollout or its resources are."""
    rollout: Rollout | None = None
    """The rollout of several turns that it belongs to. A call without a place begins it, wherever it is sent."""

    @property
    def kind(self) -> tuple[int, str]:
        """Calls of one kind are expected to cost the same."""
        return self.header["env"], self.header["op"]

    def limit(self, timeout_seconds: float) -> float:
        """Seconds that it may take, where the pool's calls may take `timeout_seconds`."""
        return timeout_seconds if self.timeout_seconds is None else self.timeout_seconds


@dataclass(slots=True, eq=False)
class Rollout:
    """A rollout of several turns. `place` is the one that holds its state, once its first call was sent.

    `key` is what the worker knows it by; unlike the id that its caller chose, it is never used again.
    """

    key: int
    label: str
    place: Any = None
    lost: str | None = None
    """How its place ended, if it took the state along."""


@dataclass(slots=True)
class Costs:
    """Smoothed seconds that a kind of call spends on a worker's main thread."""

    _seconds: dict[tuple[int, str], float] = field(default_factory=dict)

    def expected(self, kind: tuple[int, str]) -> float:
        return self._seconds.get(kind, UNKNOWN_COST)

    def measured(self, kind: tuple[int, str], seconds: float) -> None:
        """Rises at once and falls slowly, so that one expensive call in ten keeps the queue short."""
        before = self._seconds.get(kind, seconds)
        share = 0.5 if seconds > before else 0.1
        self._seconds[kind] = before + share * (seconds - before)


class Death(Enum):
    """How a worker's process ended, which says what a call of it may be blamed for."""

    ALONE = auto()
    """By itself, and nobody has asked for it: something that it ran has ended it."""
    BY_POOL = auto()
    """The pool ended it, and has settled the blame already."""
    WITH_SERVER = auto()
    """Together with the process that it was forked from, which a call of any worker may have ended."""
    BY_SIGNAL = auto()
    """By a signal from outside, which no call causes but one that makes the kernel kill for memory."""


@dataclass(slots=True)
class WorkerState:
    """What one worker holds. Ids are those of dispatches, rising."""

    queued: dict[int, Call] = field(default_factory=dict)
    """Sent and not begun, or on the main thread now; in the order of sending."""
    parked: dict[int, Call] = field(default_factory=dict)
    """Waiting in the worker's event loop."""
    expected_seconds: float = 0.0
    stray_seconds: float = 0.0
    """Time for which a call that this seat no longer owns has held the main thread."""
    last_reading: tuple[int, int] = (0, 0)
    held_seconds: float = 0.0
    """Time for which the present call has held the main thread without a break."""
    num_rollouts: int = 0
    """Rollouts of several turns whose state is here."""

    @property
    def num_held(self) -> int:
        return len(self.queued) + len(self.parked)

    def admits(self, expected_seconds: float) -> bool:
        """Whether a call of that cost may be sent now."""
        if len(self.parked) >= MAX_PARKED:
            return False
        if not self.queued:
            return True
        return len(self.queued) < MAX_QUEUED and self.expected_seconds + expected_seconds <= AHEAD_SECONDS

    def sent(self, call_id: int, call: Call) -> None:
        self.queued[call_id] = call
        self.expected_seconds += call.expected_seconds

    def begun_waiting(self, call_id: int) -> Call | None:
        """The call has left the main thread for the event loop. None: it is no longer ours."""
        call = self._unqueue(call_id)
        if call is not None:
            self.parked[call_id] = call
        return call

    def answered(self, call_id: int) -> Call | None:
        """The call is over. None: it is no longer ours."""
        return self.parked.pop(call_id, None) or self._unqueue(call_id)

    def _unqueue(self, call_id: int) -> Call | None:
        call = self.queued.pop(call_id, None)
        if call is not None:
            self.expected_seconds = max(0.0, self.expected_seconds - call.expected_seconds) if self.queued else 0.0
        return call

    def charge(self, reading: tuple[int, int], seconds: float) -> None:
        """Count `seconds` that passed, given the slot's `(current, entries)` at their end."""
        current, _ = reading
        stuck = current != 0 and reading == self.last_reading
        self.last_reading = reading
        self.held_seconds = self.held_seconds + seconds if stuck else 0.0
        if stuck:
            owner = self.queued.get(current) or self.parked.get(current)
            if owner is None:
                self.stray_seconds += seconds
            else:
                owner.used_seconds += seconds
            return
        self.stray_seconds = 0.0
        for call in self.parked.values():
            call.used_seconds += seconds
        if current in self.queued:
            self.queued[current].used_seconds += seconds
        elif current == 0 and not self.parked and self.queued:
            next(iter(self.queued.values())).used_seconds += seconds

    def overdue(self, timeout_seconds: float) -> list[tuple[int, Call]]:
        """Calls whose deadline has passed, with their ids."""
        held = (*self.queued.items(), *self.parked.items())
        return [(call_id, call) for call_id, call in held if call.used_seconds >= call.limit(timeout_seconds)]

    def only_waits(self, call_id: int) -> bool:
        """Whether the call waits in the event loop and does not hold the main thread."""
        return call_id in self.parked and self.last_reading[0] != call_id

    def withdraw_unbegun(self) -> dict[int, Call]:
        """Take back the calls behind the one that holds the main thread, for another worker.

        The worker may have begun one of them by the time it hears of this, and then it is played twice. So a call that
        changes the state of a rollout, or that could go nowhere else, stays where it is.
        """
        current = self.last_reading[0]
        taken = {
            call_id: call
            for call_id, call in self.queued.items()
            if call_id > current and call.rollout is None and call.place is None
        }
        for call_id in taken:
            self._unqueue(call_id)
        return taken

    def died(self, reading: tuple[int, int], death: Death) -> tuple[Call | None, list[Call]]:
        """Empty the seat: the call to blame, if any, and the others in order.

        Nothing is counted on any call when the pool ended the worker. When it went with its server, the death is
        counted on all that had begun. Else it is on the call that held the main thread: that one is to blame, and after
        a signal from outside it runs again too, with the death counted on it. If none held the thread, a call that
        waited in the event loop may have caused the death (through a thread or a subprocess), or the first in the
        queue, whose answer was under way; so the death is counted on each of those.
        """
        current, _ = reading
        running = self.queued.get(current) or self.parked.get(current)
        culprit = None
        if running is not None and death is Death.ALONE:
            culprit = running
        elif running is not None and death is Death.BY_SIGNAL:
            running.deaths += 1
        elif death is not Death.BY_POOL:
            first = current if current or death is Death.WITH_SERVER else next(iter(self.queued), 0)
            begun = [*self.parked.values(), *([self.queued[first]] if first in self.queued else [])]
            for call in begun:
                call.deaths += 1
        held = sorted({**self.queued, **self.parked}.items(), key=lambda item: item[0])
        others = [call for _, call in held if call is not culprit]
        self.queued.clear()
        self.parked.clear()
        self.expected_seconds = self.stray_seconds = self.held_seconds = 0.0
        self.last_reading = (0, 0)
        return culprit, others


class WorkerLoad(Protocol):
    """A place that calls can be sent to."""

    seat: WorkerState


Place = TypeVar("Place", bound=WorkerLoad)


class CallQueue:
    """`len` counts the calls that wait, those whose caller went away included."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._anywhere: deque[Call] = deque()
        self._at: defaultdict[Any, deque[Call]] = defaultdict(deque)
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._anywhere) + sum(map(len, self._at.values()))

    def add(self, call: Call) -> None:
        self._line_of(call).append(call)

    def _line_of(self, call: Call) -> deque[Call]:
        return self._anywhere if call.place is None else self._at[call.place]

    def withdraw_at(self, place: Any) -> list[Call]:
        """Take away the calls of rollouts that wait for a place."""
        line = self._at[place]
        taken = [call for call in line if call.rollout is not None]
        self._at[place] = deque(call for call in line if call.rollout is None)
        return taken

    def run_again(self, calls: Sequence[Call]) -> None:
        """Put calls back to the front, in order. One that has seen too many deaths fails instead."""
        for call in reversed(calls):
            if call.future.done():
                continue
            call.used_seconds = 0.0
            if call.place is None and call.rollout is not None:
                leave(call.rollout)  # it begins anew, wherever
            if call.deaths >= MAX_DEATHS:
                call.future.set_exception(
                    EnvironmentFailure(f"{call.label} was given up: its process died {call.deaths} times around it")
                )
            else:
                self._line_of(call).appendleft(call)

    def dispatch(self, places: Iterable[Place]) -> Iterator[tuple[Place, int, Call]]:
        """WorkerState waiting calls while a place admits the first of them, the least loaded place first.

        Yields the place, the id of the dispatch and the call, which is then to be sent.
        """
        candidates = list(places)
        for place in candidates:
            while (call := self._first(self._at[place])) is not None and self._admits(place, call):
                yield self._seat(place, self._at[place])
        while (call := self._first(self._anywhere)) is not None and candidates:
            begins = call.rollout is not None
            place = min(candidates, key=lambda p: (p.seat.num_rollouts if begins else 0, *_load(p.seat)))
            if self._admits(place, call):
                yield self._seat(place, self._anywhere)
            else:
                candidates.remove(place)

    def _first(self, line: deque[Call]) -> Call | None:
        """The first call of a line whose caller is still there."""
        while line and line[0].future.done():
            line.popleft()
        return line[0] if line else None

    def _admits(self, place: WorkerLoad, call: Call) -> bool:
        call.expected_seconds = self.costs.expected(call.kind)
        return place.seat.admits(call.expected_seconds)

    def _seat(self, place: Place, line: deque[Call]) -> tuple[Place, int, Call]:
        call = line.popleft()
        self._last_id += 1
        place.seat.sent(self._last_id, call)
        if call.rollout is not None and call.rollout.place is None:
            call.rollout.place = place
            place.seat.num_rollouts += 1
        return place, self._last_id, call

    def fail(self, error: Exception) -> None:
        """Give every waiting call the error."""
        for line in (self._anywhere, *self._at.values()):
            for call in line:
                if not call.future.done():
                    call.future.set_exception(error)
            line.clear()


def leave(rollout: Rollout) -> None:
    """The rollout's state is not at its place any more."""
    if rollout.place is not None:
        rollout.place.seat.num_rollouts -= 1
        rollout.place = None


def _load(seat: WorkerState) -> tuple[float, int, int]:
    """How busy a place is."""
    return seat.expected_seconds, len(seat.queued), seat.num_held
