"""Calls that wait for a worker, and which of them goes where next.

Owns the order of the calls, their expected costs and the ids of dispatches. Knows no processes: a place that a call can
go to is whatever has a `Seat`. First come, first served; a call that has to run again goes to the front; a call that
can run in one place only waits for that place, and there goes before those that can run anywhere.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from telescope.environments.schedule import MAX_DEATHS, Call, Costs, Rollout, Seat
from telescope.errors import EnvironmentFailure


class Seated(Protocol):
    """A place that calls can be sent to."""

    seat: Seat


Place = TypeVar("Place", bound=Seated)


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
        """Seat waiting calls while a place admits the first of them, the least loaded place first.

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

    def _admits(self, place: Seated, call: Call) -> bool:
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


def _load(seat: Seat) -> tuple[float, int, int]:
    """How busy a place is."""
    return seat.expected_seconds, len(seat.queued), seat.num_held
