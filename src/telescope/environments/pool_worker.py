"""One worker of the pool: a seat, the process that sits in it, and the deadlines of its calls.

Looks at deadlines when the pool tells it to, and ends its process when one has passed. Does not choose what runs where
(`call_queue`, `schedule`), does not replace the process (`pool`).
"""

from __future__ import annotations

import logging

from telescope.environments.process import WorkerProcess
from telescope.environments.schedule import Call, Death, Seat
from telescope.errors import EnvironmentFailure

TICK_SECONDS = 0.05
"""How often deadlines are looked at, and the age at which a call counts as slow: those behind it go elsewhere."""

CANCEL_SECONDS = 2.0
"""Given to a waiting call to end after its cancellation, before its process is killed."""

logger = logging.getLogger(__name__)


class PoolWorker:
    """`ready` once its environments are loaded; `killed` when it was decided to end the process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.seat = Seat()
        self.process: WorkerProcess | None = None
        self.ready = False
        self.killed = False
        self.loading = "starting"
        """What its process was last doing before it was ready."""
        self.failed_starts = 0
        self.deadlines_passed = 0

    @property
    def takes_calls(self) -> bool:
        return self.ready and not self.killed

    def sits_down(self, process: WorkerProcess) -> None:
        """A new process takes the seat."""
        self.process = process
        self.ready = self.killed = False
        self.loading = "starting"

    def gone(self) -> list[Call]:
        """The process has ended, and the call to blame for it, if any, fails. Returns the calls to run again."""
        process = self.process
        assert process is not None
        culprit, others = self.seat.died(process.slot.read(), self._death(process))
        if not (self.ready or process.is_lost):
            self.failed_starts += 1
        self.process, self.ready = None, False
        if culprit is not None and not culprit.future.done():
            culprit.future.set_exception(
                EnvironmentFailure(f"{culprit.label} ended its process, which {process.epitaph()}")
            )
        return others

    def _death(self, process: WorkerProcess) -> Death:
        if self.killed:
            return Death.BY_POOL
        if process.is_lost:
            return Death.WITH_SERVER
        return Death.BY_SIGNAL if process.ended_from_outside else Death.ALONE

    def watch(self, elapsed: float, timeout_seconds: float) -> list[Call]:
        """Charge the calls for `elapsed` seconds and act on deadlines. Returns calls that go elsewhere."""
        process, seat = self.process, self.seat
        assert process is not None
        if not seat.num_held and not process.slot.read()[0]:
            return []
        seat.charge(process.slot.read(), elapsed)
        for call_id, call in seat.overdue(timeout_seconds):
            if not call.future.done():
                self.deadlines_passed += 1
                call.future.set_exception(
                    EnvironmentFailure(
                        f"{call.label} did not end within {call.limit(timeout_seconds):g} seconds"
                        f"{' (environment_timeout_seconds)' if call.timeout_seconds is None else ''}; where it was is "
                        f"in {process.log_path}"
                    )
                )
                if seat.only_waits(call_id):
                    process.send({"op": "cancel", "id": call_id})
                    process.flush()
            if seat.only_waits(call_id) and call.used_seconds < call.limit(timeout_seconds) + CANCEL_SECONDS:
                continue
            self._kill()
            return []
        if seat.stray_seconds >= timeout_seconds:
            self._kill()
        elif seat.held_seconds >= TICK_SECONDS and len(seat.queued) > 1:
            return self._take_back()
        return []

    def give_up(self, call: Call) -> None:
        """Nobody wants the answer of a call any more: end its wait, if it waits."""
        for call_id, held in self.seat.parked.items():
            if held is call and self.process is not None:
                self.process.send({"op": "cancel", "id": call_id})
                self.process.flush()

    def _take_back(self) -> list[Call]:
        """A slow call holds the worker: those behind it go elsewhere."""
        assert self.process is not None
        taken = self.seat.withdraw_unbegun()
        if taken:
            self.process.send({"op": "withdraw", "ids": list(taken)})
            self.process.flush()
        return list(taken.values())

    def _kill(self) -> None:
        assert self.process is not None
        logger.warning("Environment worker %d exceeded a deadline and is replaced", self.index)
        self.killed = True
        self.process.kill_with_stacks()
