"""Multi-turn rollouts, as the driver requests them.

    prompt = await pool.begin("r1", "wordle", item)
    while True:
        advance = await pool.respond("r1", token_ids, logprobs, stop_reason)
        if advance.done: break
    ...
    pool.cancel("r1")    # at any time, to stop early

One process keeps the state of a rollout from `begin` to its end; only this module knows which one. A rollout is over,
and its id free, after an `Advance` with `done`, after any exception, and after `cancel`.

Invariant: an open rollout either has a live worker, or was lost with a worker and its next call raises `RolloutLost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from telescope.environments.types import Advance, FirstPrompt
from telescope.errors import EnvironmentFailure, InfrastructureError, RolloutLost
from telescope.rollout.worker_pool.messages import pack_floats, pack_ids, read_advance, unpack_ids
from telescope.rollout.worker_pool.scheduling import Call, Rollout, unbind
from telescope.rollout.worker_pool.worker_handle import PoolWorker
from telescope.rollout.worker_pool.workers import WorkerPool

logger = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], bytes]


class PoolRollouts:
    """The open rollouts of a pool."""

    def __init__(self, workers: WorkerPool) -> None:
        self._call = workers.call
        self._queue = workers.queue
        self._open: dict[str, tuple[Rollout, int]] = {}
        self._calls: dict[str, Call] = {}
        """The pending call of each rollout."""
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._open)

    async def begin(
        self, rollout: str, position: int, index: int, label: str, home: PoolWorker | None, *, interleaved: bool
    ) -> FirstPrompt:
        """See `EnvironmentPool.begin`. `home` is the only worker that can run it, if any (`EnvironmentPool._home`)."""
        if rollout in self._open:
            raise ValueError(f"the rollout {rollout!r} is already open")
        self._last_key += 1
        record = Rollout(self._last_key, label)
        self._open[rollout] = record, position
        header = {"op": "begin", "env": position, "rollout": record.key, "index": index, "interleaved": interleaved}
        call = self._call(header, b"", f"{label}: begin", worker=home, rollout=record)
        result, blob = await self._answer(rollout, record, call)
        return FirstPrompt(unpack_ids(blob), result["messages"])

    async def respond(
        self,
        rollout: str,
        token_ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        stop_reason: str,
        *,
        for_eval: bool,
        max_context: int | None,
    ) -> Advance:
        """See `EnvironmentPool.respond`."""
        record, position = self._find(rollout)
        header = {
            "op": "respond", "env": position, "rollout": record.key, "stop_reason": stop_reason,
            "num_ids": len(token_ids), "for_eval": for_eval, "max_context": max_context,
        }  # fmt: skip
        blob = pack_ids(token_ids) + pack_floats(logprobs)
        call = self._call(header, blob, f"{record.label}: respond", worker=record.worker, rollout=record)
        advance = read_advance(*await self._answer(rollout, record, call))
        if advance.done:
            self._drop(rollout)
        return advance

    def cancel(self, rollout: str) -> None:
        """See `EnvironmentPool.cancel`."""
        if rollout not in self._open:
            return
        record, position = self._open[rollout]
        worker = record.worker
        pending = self._calls.pop(rollout, None)
        self._drop(rollout)
        if pending is not None:
            pending.future.cancel()
            if worker is not None:
                worker.cancel_call(pending)
        self._end(record, position, worker)

    def _end(self, record: Rollout, position: int, worker: PoolWorker | None) -> None:
        """Makes the worker end the rollout, if it ever began there."""
        if worker is None or record.lost is not None:
            return
        header = {"op": "end", "env": position, "rollout": record.key}

        def log_error(future: asyncio.Future[Answer]) -> None:  # which no caller awaits
            if not future.cancelled() and (error := future.exception()) is not None:
                logger.warning("%s", error)

        self._call(header, b"", f"{record.label}: end", worker=worker).future.add_done_callback(log_error)

    def lose_worker(self, worker: PoolWorker, calls: list[Call], how: str) -> list[Call]:
        """Marks the rollouts of a worker that ended as lost. Returns those of its calls that must run again."""
        for record, _ in self._open.values():
            if record.worker is worker:
                record.lost = how
        again = []
        for call in [*calls, *self._queue.withdraw_rollout_calls(worker)]:
            begins = call.header["op"] == "begin"
            if begins and call.rollout is not None:
                call.rollout.lost = None  # its caller has received nothing yet
                unbind(call.rollout)
                again.append(call)
            elif call.rollout is not None:
                if not call.future.done():
                    call.future.set_exception(_lost(call.rollout, how))
            elif call.header["op"] != "end":
                again.append(call)
            elif not call.future.done():
                call.future.cancel()  # the rollout ended with its worker
        worker.state.num_rollouts = 0
        return again

    def _find(self, rollout: str) -> tuple[Rollout, int]:
        if rollout not in self._open:
            raise ValueError(f"the rollout {rollout!r} is not open")
        record, position = self._open[rollout]
        if record.lost is not None:
            self._drop(rollout)
            raise _lost(record, record.lost)
        return record, position

    async def _answer(self, rollout: str, record: Rollout, call: Call) -> Answer:
        self._calls[rollout] = call
        try:
            return await call.future
        except (EnvironmentFailure, InfrastructureError):
            if rollout in self._open and self._open[rollout][0] is record:
                position, worker = self._open[rollout][1], record.worker
                self._drop(rollout)
                self._end(record, position, worker)  # the worker may still run it
            raise
        finally:
            if self._calls.get(rollout) is call:
                del self._calls[rollout]

    def _drop(self, rollout: str) -> None:
        record, _ = self._open.pop(rollout)
        if record.lost is None:
            unbind(record)


def _lost(record: Rollout, how: str) -> RolloutLost:
    return RolloutLost(f"{record.label}: its worker process {how}")
