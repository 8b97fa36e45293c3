"""Calls that wait for a worker, and which of them goes where next.

Owns the order of the calls, their expected costs and the ids of dispatches. Knows no processes: a place that a call can
go to is whatever has a `Seat`. First come, first served; a call that has to run again goes to the front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from telescope.environments.schedule import MAX_DEATHS, Call, Costs, Seat
from telescope.errors import EnvironmentFailure


class Seated(Protocol):
    """A place that calls can be sent to."""

    seat: Seat


Place = TypeVar("Place", bound=Seated)


class CallQueue:
    """`len` counts the calls that wait, those whose caller went away included."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._waiting: deque[Call] = deque()
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, call: Call) -> None:
        self._waiting.append(call)

    def run_again(self, calls: Sequence[Call]) -> None:
        """Put calls back to the front, in order. One that has seen too many deaths fails instead."""
        for call in reversed(calls):
            if call.future.done():
                continue
            call.used_seconds = 0.0
            if call.deaths >= MAX_DEATHS:
                call.future.set_exception(
                    EnvironmentFailure(f"{call.label} was given up: its process died {call.deaths} times around it")
                )
            else:
                self._waiting.appendleft(call)

    def dispatch(self, places: Iterable[Place]) -> Iterator[tuple[Place, int, Call]]:
        """Seat waiting calls while a place admits the first of them, the least loaded place first.

        Yields the place, the id of the dispatch and the call, which is then to be sent.
        """
        candidates = list(places)
        while self._waiting and candidates:
            call = self._waiting[0]
            if call.future.done():  # its caller went away
                self._waiting.popleft()
                continue
            call.expected_seconds = self.costs.expected(call.kind)
            place = min(candidates, key=lambda p: (p.seat.expected_seconds, len(p.seat.queued), p.seat.num_held))
            if not place.seat.admits(call.expected_seconds):
                candidates.remove(place)
                continue
            self._waiting.popleft()
            self._last_id += 1
            place.seat.sent(self._last_id, call)
            yield place, self._last_id, call

    def fail(self, error: Exception) -> None:
        """Give every waiting call the error."""
        for call in self._waiting:
            if not call.future.done():
                call.future.set_exception(error)
        self._waiting.clear()
