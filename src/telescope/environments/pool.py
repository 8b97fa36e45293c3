"""Environments behind worker processes, as the driver uses them.

The pool starts the processes, sends them calls, and keeps its promises whatever user code does: a call that raises,
hangs, exits or crashes becomes an `EnvironmentFailure` of that call alone; the process is replaced if it has to be, and
what else was in it runs again. Which call goes where is the matter of `call_queue` and `schedule`, what a process is of
`process`, and what its deadlines are of `pool_worker`.

Everything runs in the driver's event loop without a task per call: a call is a future in a queue, and frames are
written once per turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telescope.environments.call_queue import CallQueue
from telescope.environments.launcher import Launcher
from telescope.environments.pool_worker import TICK_SECONDS, PoolWorker
from telescope.environments.process import STACK_SECONDS, WorkerProcess
from telescope.environments.records import (
    Advance,
    EnvironmentInfo,
    EnvironmentSpec,
    PoolStatus,
    PreparedPrompt,
    RendererSpec,
    RewardRecord,
    load_header,
)
from telescope.environments.schedule import Call
from telescope.environments.wire import pack_ids, unpack_ids
from telescope.errors import DeadlineExceeded, EnvironmentFailure, InfrastructureError, UserError

POLITE_SECONDS = 1.0
"""Given to the processes to end by themselves when the pool is closed."""
BURIAL_SECONDS = 5.0
"""Given to the kernel to end those that were killed."""

MAX_FAILED_STARTS = 3
IDENTITIES_PER_CALL = 2_000

logger = logging.getLogger(__name__)


class EnvironmentPool:
    """Runs environments in `num_workers` processes; every process has all of them.

    `timeout_seconds` bounds one call of user code. `start_timeout_seconds` bounds loading, downloads included.
    `memory_limit_bytes` is what user code in one process may allocate after loading (default: a quarter of the
    machine's memory, at least 2 GiB). `launcher` lets several pools share one fork server, which must have been started
    with the same renderer; without it the pool has its own. Workers log to `log_dir/environment-<i>.log`.
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        *,
        renderer: RendererSpec | None,
        num_workers: int,
        timeout_seconds: float = 120.0,
        environments_path: Sequence[str | Path] = (),
        log_dir: Path | None = None,
        start_timeout_seconds: float = 600.0,
        memory_limit_bytes: int | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._positions = {spec.identity: position for position, spec in enumerate(specs)}
        if len(self._positions) != len(specs):
            raise ValueError("two environments have the same key; give one of them a key of its own")
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; use 1 or more")
        self._specs = list(specs)
        self._load_header = load_header(specs, environments_path, memory_limit_bytes)
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._renderer = renderer
        self._launcher = launcher
        self._owns_launcher = launcher is None
        self._log_dir = log_dir
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._workers = [PoolWorker(index) for index in range(num_workers)]
        self._queue = CallQueue()
        self._infos: list[EnvironmentInfo] | None = None
        self._started: asyncio.Future[None] | None = None
        self._broken: Exception | None = None
        self._closing = False
        self._gone: asyncio.Event | None = None
        self._pump_scheduled = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._restarts = 0

    async def start(self) -> None:
        """Start all processes and load all environments.

        Raises `UserError` for what a person can mend (unknown argument, missing package, empty dataset, no chat
        template), `DeadlineExceeded` when loading takes too long, `InfrastructureError` when a process cannot live.
        """
        assert self._started is None, "the pool was started before"
        if self._log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="telescope-environments-")
            self._log_dir = Path(self._temporary.name)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        try:
            if self._launcher is None:
                self._launcher = Launcher(self._renderer, self._log_dir)
                await self._launcher.start(self._start_timeout_seconds)
            for worker in self._workers:
                self._launch(worker)
            self._last_tick = time.monotonic()
            self._tick_handle = self._loop.call_later(TICK_SECONDS, self._tick)
            await self._started
        except BaseException:
            await self.close()
            raise

    async def describe(self, env_key: str) -> EnvironmentInfo:
        """What the environment says of itself."""
        assert self._infos is not None, "the pool is not started"
        return self._infos[self._position(env_key)]

    async def identities(self, env_key: str, start: int = 0, stop: int | None = None) -> list[str]:
        """`sample_uid` of the dataset items from `start` up to `stop`, without rendering them."""
        position = self._position(env_key)
        stop = (await self.describe(env_key)).num_samples if stop is None else stop
        chunks = [(low, min(low + IDENTITIES_PER_CALL, stop)) for low in range(start, stop, IDENTITIES_PER_CALL)]
        answers = await asyncio.gather(
            *(
                self._call(
                    {"op": "identities", "env": position, "start": low, "stop": high},
                    b"",
                    f"environment {env_key!r}, items {low} to {high}: reading them",
                )
                for low, high in chunks
            )
        )
        return [uid for result, _ in answers for uid in result["uids"]]

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        """Render and tokenise the prompt of a dataset item. Raises `EnvironmentFailure`."""
        label = f"environment {env_key!r}, item {index}: preparing the prompt"
        header = {"op": "prepare", "env": self._position(env_key), "index": index}
        result, blob = await self._call(header, b"", label)
        return PreparedPrompt(unpack_ids(blob), result["text"], result["messages"], result["sample_uid"])

    async def advance(
        self,
        env_key: str,
        index: int,
        completion_token_ids: Sequence[int] | np.ndarray,
        stop_reason: str,
        *,
        for_eval: bool = False,
    ) -> Advance:
        """Hand the environment a completion; of a single turn this is the end, with its reward.

        `for_eval` asks for the metrics of an evaluation instead of the reward. Raises `EnvironmentFailure` when user
        code raises, returns something malformed, exceeds the deadline, or ends its process.
        """
        label = f"environment {env_key!r}, item {index}: {'compute_eval_metrics' if for_eval else 'compute_reward'}"
        header = {
            "op": "advance",
            "env": self._position(env_key),
            "index": index,
            "stop_reason": stop_reason,
            "for_eval": for_eval,
        }
        result, _ = await self._call(header, pack_ids(completion_token_ids), label)
        return Advance(True, [], result["text"], RewardRecord(**result["score"]), result["seconds"])

    async def close(self) -> None:
        """End all processes; within seconds, whatever they are doing."""
        self._closing = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        closed = InfrastructureError("the environment pool was closed")
        self._fail_all(closed)
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.hang_up()
        for patience in (POLITE_SECONDS, BURIAL_SECONDS):
            try:
                await asyncio.wait_for(self._all_gone(), patience)
            except TimeoutError:
                for process in processes:
                    process.kill()
        if self._owns_launcher and self._launcher is not None:
            await self._launcher.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _all_gone(self) -> None:
        """Until no worker has a process. Only while closing: otherwise the dead are replaced."""
        self._gone = asyncio.Event()
        while any(worker.process is not None for worker in self._workers):
            self._gone.clear()
            await self._gone.wait()

    def status(self) -> PoolStatus:
        """State and counts; cheap enough to ask every second."""
        return PoolStatus(
            workers_ready=sum(worker.ready for worker in self._workers),
            calls_waiting=len(self._queue),
            calls_in_workers=sum(worker.seat.num_held for worker in self._workers),
            restarts=self._restarts,
            deadlines_passed=sum(worker.deadlines_passed for worker in self._workers),
            pids=tuple(worker.process.pid for worker in self._workers if worker.process and worker.process.pid),
        )

    def dump_stacks(self) -> None:
        """Have every worker write its stacks to its log."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.dump_stacks()

    # Calls

    def _position(self, env_key: str) -> int:
        try:
            return self._positions[env_key]
        except KeyError:
            known = ", ".join(self._positions)
            raise ValueError(f"the pool has no environment {env_key!r}; it has {known}") from None

    def _call(self, header: dict[str, Any], blob: bytes, label: str) -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        """A future of the answer's fields and blob."""
        assert self._infos is not None, "the pool is not started"
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = self._loop.create_future()
        if self._broken is not None or self._closing:
            future.set_exception(self._broken or InfrastructureError("the environment pool was closed"))
            return future
        self._queue.add(Call(header, blob, future, label))
        self._schedule_pump()
        return future

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send waiting calls to workers that admit them, the least loaded first, and write it all at once."""
        self._pump_scheduled = False
        touched: set[WorkerProcess] = set()
        for worker, call_id, call in self._queue.dispatch(w for w in self._workers if w.takes_calls):
            assert worker.process is not None
            worker.process.send({"id": call_id, **call.header}, call.blob)
            touched.add(worker.process)
        for process in touched:
            process.flush()

    # Processes

    def _launch(self, worker: PoolWorker) -> None:
        assert self._log_dir is not None
        assert self._launcher is not None
        try:
            process = WorkerProcess(
                self._launcher,
                self._log_dir / f"environment-{worker.index}.log",
                on_frame=lambda header, blob: self._on_frame(worker, header, blob),
                on_gone=lambda: self._on_gone(worker),
            )
        except (UserError, InfrastructureError) as error:
            self._break(error)  # there is nothing any more that it could be forked from
            return
        worker.sits_down(process)
        process.send(self._load_header)
        process.flush()

    def _on_frame(self, worker: PoolWorker, header: dict[str, Any], blob: bytes) -> None:
        if "id" not in header:
            self._on_notice(worker, header)
            return
        call = worker.seat.answered(header["id"])
        if call is not None:
            self._queue.costs.measured(call.kind, header["busy"])
            if call.future.done():
                pass  # its caller went away, or its deadline has passed
            elif "failed" in header:
                call.future.set_exception(EnvironmentFailure(f"{call.label} failed: {header['failed']}"))
            else:
                header["result"]["seconds"] = header["seconds"]
                call.future.set_result((header["result"], blob))
        if self._queue:
            self._schedule_pump()

    def _on_notice(self, worker: PoolWorker, header: dict[str, Any]) -> None:
        if "parked" in header:
            call = worker.seat.begun_waiting(header["parked"])
            if call is not None:
                self._queue.costs.measured(call.kind, header["busy"])
            if self._queue:
                self._schedule_pump()
        elif "loading" in header:
            worker.loading = header["loading"]
        elif "ready" in header:
            self._on_ready(worker, [EnvironmentInfo(**fields) for fields in header["ready"]])
        elif header["user_error"]:
            self._break(UserError(header["failed"]))
        else:
            assert worker.process is not None
            self._break(
                InfrastructureError(
                    f"The environments cannot be loaded: {header['failed']}\n{worker.process.log_tail()}"
                )
            )

    def _on_ready(self, worker: PoolWorker, infos: list[EnvironmentInfo]) -> None:
        if self._infos is None:
            self._infos = infos
        for spec, mine, theirs in zip(self._specs, self._infos, infos, strict=True):
            if (mine.num_samples, mine.dataset_digest) != (theirs.num_samples, theirs.dataset_digest):
                self._break(
                    UserError(
                        f"The environment {spec.name!r} loads another dataset in each process: {mine.num_samples} and "
                        f"{theirs.num_samples} items, or other items. Draw from a random generator with a fixed seed, "
                        "and sort what comes in no order."
                    )
                )
                return
        worker.ready = True
        worker.failed_starts = 0
        if self._started is not None and not self._started.done() and all(w.ready for w in self._workers):
            self._started.set_result(None)
        self._schedule_pump()

    def _on_gone(self, worker: PoolWorker) -> None:
        process = worker.process
        assert process is not None
        others = worker.gone()
        if self._closing or self._broken is not None:
            if self._gone is not None:
                self._gone.set()
            return
        if not (worker.killed or process.is_lost):
            logger.warning("Environment worker %d %s", worker.index, process.epitaph())
        if worker.failed_starts >= MAX_FAILED_STARTS:
            self._break(
                InfrastructureError(
                    f"An environment worker died {worker.failed_starts} times while it was {worker.loading}; the last "
                    f"one {process.epitaph()}"
                )
            )
            return
        self._restarts += 1
        self._queue.run_again(others)
        self._launch(worker)
        self._schedule_pump()

    def _break(self, error: Exception) -> None:
        """Nothing more can be done: every call, present and future, gets the error."""
        if self._broken is None:
            self._broken = error
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        held = [call for w in self._workers for call in (*w.seat.queued.values(), *w.seat.parked.values())]
        for call in held:
            if not call.future.done():
                call.future.set_exception(error)
        self._queue.fail(error)

    # Deadlines

    def _tick(self) -> None:
        self._tick_handle = self._loop.call_later(TICK_SECONDS, self._tick)
        now = time.monotonic()
        # Time in which the driver itself was held up is not counted against anyone.
        elapsed = min(now - self._last_tick, 2 * TICK_SECONDS)
        self._last_tick = now
        for worker in self._workers:
            if worker.process is None or worker.killed:
                continue
            if worker.ready:
                taken = worker.watch(elapsed, self._timeout_seconds)
                if taken:
                    self._queue.run_again(taken)
                    self._schedule_pump()
            elif now - worker.process.started > self._start_timeout_seconds:
                self._give_up_loading(worker, worker.process)

    def _give_up_loading(self, worker: PoolWorker, process: WorkerProcess) -> None:
        process.dump_stacks()
        self._loop.call_later(STACK_SECONDS, self._break_loading, worker, process)

    def _break_loading(self, worker: PoolWorker, process: WorkerProcess) -> None:
        self._break(
            DeadlineExceeded(
                f"An environment worker was still {worker.loading} after {self._start_timeout_seconds:g} seconds; its "
                f"log ({process.log_path}) ends:\n{process.log_tail()}"
            )
        )
