"""The worker processes of the pool: start, send calls, watch, replace.

A call is a future in a queue, without a task, and frames are written once per iteration of the driver's event loop.
`scheduling` chooses the worker of a call.

Invariant: every call ends, with an answer or an exception, whatever the processes do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import DeadlineExceeded, EnvironmentFailure, InfrastructureError, UserError
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.rollout.worker_pool.messages import PoolStatus
from telescope.rollout.worker_pool.scheduling import Call, CallQueue, Rollout
from telescope.rollout.worker_pool.worker import CLOSE_SECONDS
from telescope.rollout.worker_pool.worker_handle import STACK_SECONDS, TICK_SECONDS, PoolWorker, WorkerProcess

EXIT_SECONDS = 1.0
"""Time for the processes to exit by themselves when the pool is closed."""
RELEASE_SECONDS = CLOSE_SECONDS + EXIT_SECONDS
"""The same, when an environment has resources to close or rollouts to end."""
REAP_SECONDS = 5.0
"""Time for killed processes to be reaped."""

MAX_FAILED_STARTS = 3

logger = logging.getLogger(__name__)


class WorkerPool:
    """`num_workers` processes that load `specs`.

    Without a `launcher` it makes its own with `make_launcher(log folder)`. When a process ends, `on_ended(worker, its
    calls, how it ended)` returns the calls to run again.
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        load_header: dict[str, Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        start_timeout_seconds: float,
        log_dir: Path,
        launcher: Launcher | None,
        make_launcher: Callable[[Path], Launcher],
        on_ended: Callable[[PoolWorker, list[Call], str], list[Call]],
    ) -> None:
        self.workers = [PoolWorker(index) for index in range(num_workers)]
        self.queue = CallQueue()
        self.infos: list[EnvironmentInfo] | None = None
        """Descriptions of the environments, once the first process has loaded them."""
        self._specs = list(specs)
        self._load_header = load_header
        self._timeout_seconds = timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._log_dir = log_dir
        self._launcher = launcher
        self._owns_launcher = launcher is None
        self._make_launcher = make_launcher
        self._on_worker_ended = on_ended
        self._started: asyncio.Future[None] | None = None
        self._broken: Exception | None = None
        self._closing = False
        self._worker_ended: asyncio.Event | None = None
        self._pump_scheduled = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._restarts = 0

    async def start(self) -> None:
        """Starts all processes and loads all environments; see `EnvironmentPool.start`."""
        assert self._started is None, "the pool was already started"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        if self._launcher is None:
            self._launcher = self._make_launcher(self._log_dir)
            await self._launcher.start(self._start_timeout_seconds)
        for worker in self.workers:
            self._launch(worker)
        self._last_tick = time.monotonic()
        self._tick_handle = self._loop.call_later(TICK_SECONDS, self._tick)
        await self._started

    async def close(self) -> None:
        """Ends all processes within seconds, whatever they are doing."""
        self._closing = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        closed = InfrastructureError("the environment pool was closed")
        self._fail_all(closed)
        processes = [worker.process for worker in self.workers if worker.process is not None]
        for process in processes:
            process.close_stream()
        has_cleanup = any(info.shares_resources or info.ends_rollouts for info in self.infos or ())
        exit_seconds = RELEASE_SECONDS if has_cleanup else EXIT_SECONDS
        for timeout in (exit_seconds, REAP_SECONDS):
            try:
                await asyncio.wait_for(self._wait_until_all_ended(), timeout)
            except TimeoutError:
                for process in processes:
                    process.kill()
        if self._owns_launcher and self._launcher is not None:
            await self._launcher.close()

    async def _wait_until_all_ended(self) -> None:
        """Waits until no worker has a process. Only while closing: otherwise processes are replaced."""
        self._worker_ended = asyncio.Event()
        while any(worker.process is not None for worker in self.workers):
            self._worker_ended.clear()
            await self._worker_ended.wait()

    def status(self, rollouts_open: int) -> PoolStatus:
        """Returns state and counts."""
        return PoolStatus(
            workers_ready=sum(worker.ready for worker in self.workers),
            calls_waiting=len(self.queue),
            calls_in_workers=sum(worker.state.num_calls for worker in self.workers),
            rollouts_open=rollouts_open,
            restarts=self._restarts,
            deadlines_passed=sum(worker.deadlines_passed for worker in self.workers),
            pids=tuple(worker.process.pid for worker in self.workers if worker.process and worker.process.pid),
        )

    def dump_stacks(self) -> None:
        """Makes every worker write its stacks to its log."""
        for worker in self.workers:
            if worker.process is not None:
                worker.process.dump_stacks()

    def call(
        self,
        header: dict[str, Any],
        blob: bytes,
        label: str,
        *,
        worker: PoolWorker | None = None,
        rollout: Rollout | None = None,
        timeout_seconds: float | None = None,
    ) -> Call:
        """Queues a request. `worker` is the only worker that may run it, `rollout` the rollout that it belongs to."""
        assert self.infos is not None, "the pool is not started"
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = self._loop.create_future()
        call = Call(header, blob, future, label, worker=worker, rollout=rollout, timeout_seconds=timeout_seconds)
        if self._broken is not None or self._closing:
            future.set_exception(self._broken or InfrastructureError("the environment pool was closed"))
            return call
        self.queue.add(call)
        self._schedule_pump()
        return call

    def _schedule_pump(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Sends waiting calls to workers with capacity, with one write per worker."""
        self._pump_scheduled = False
        touched: set[WorkerProcess] = set()
        for worker, call_id, call in self.queue.dispatch(w for w in self.workers if w.ready and not w.killed):
            assert worker.process is not None
            worker.process.send({"id": call_id, **call.header}, call.blob)
            touched.add(worker.process)
        for process in touched:
            process.flush()

    # Processes

    def _launch(self, worker: PoolWorker) -> None:
        assert self._launcher is not None
        try:
            process = WorkerProcess(
                self._launcher,
                self._log_dir / f"environment-{worker.index}.log",
                on_frame=lambda header, blob: self._on_frame(worker, header, blob),
                on_ended=lambda: self._on_ended(worker),
            )
        except (UserError, InfrastructureError) as error:
            self._break(error)  # there is no fork server any more
            return
        worker.attach(process)
        is_start = self._started is not None and not self._started.done()
        process.send(self._load_header | {"checks_template": worker.index == 0 and is_start})  # once
        process.flush()

    def _on_frame(self, worker: PoolWorker, header: dict[str, Any], blob: bytes) -> None:
        if "id" not in header:
            self._on_notice(worker, header)
            return
        call = worker.state.answered(header["id"])
        if call is not None:
            self.queue.costs.measured(call.kind, header["busy"])
            if call.future.done():
                pass  # its caller was cancelled, or its deadline has passed
            elif "failed" in header:
                kind = InfrastructureError if header["infrastructure"] else EnvironmentFailure
                call.future.set_exception(kind(f"{call.label} failed: {header['failed']}"))
            else:
                header["result"]["seconds"] = header["seconds"]
                call.future.set_result((header["result"], blob))
        if self.queue:
            self._schedule_pump()

    def _on_notice(self, worker: PoolWorker, header: dict[str, Any]) -> None:
        if "parked" in header:
            call = worker.state.park(header["parked"])
            if call is not None:
                self.queue.costs.measured(call.kind, header["busy"])
            if self.queue:
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
        if self.infos is None:
            self.infos = infos
        for spec, mine, theirs in zip(self._specs, self.infos, infos, strict=True):
            if (mine.num_samples, mine.dataset_digest) != (theirs.num_samples, theirs.dataset_digest):
                self._break(
                    UserError(
                        f"The environment {spec.name!r} loads a different dataset in each process: {mine.num_samples} "
                        f"and {theirs.num_samples} items, or other items. Use a generator with a fixed seed, and "
                        "sort sets and directory listings."
                    )
                )
                return
        worker.ready = True
        worker.failed_starts = 0
        if self._started is not None and not self._started.done() and all(w.ready for w in self.workers):
            self._started.set_result(None)
        self._schedule_pump()

    def _on_ended(self, worker: PoolWorker) -> None:
        process = worker.process
        assert process is not None
        others = worker.process_ended()
        if self._closing or self._broken is not None:
            if self._worker_ended is not None:
                self._worker_ended.set()
            return
        if not (worker.killed or process.is_lost):
            logger.warning("Environment worker %d %s", worker.index, process.describe_end())
        if worker.failed_starts >= MAX_FAILED_STARTS:
            self._break(
                InfrastructureError(
                    f"An environment worker ended {worker.failed_starts} times while it was {worker.loading}; the last "
                    f"one {process.describe_end()}"
                )
            )
            return
        self._restarts += 1
        self.queue.requeue(self._on_worker_ended(worker, others, process.how_it_ended()))
        self._launch(worker)
        self._schedule_pump()

    def _break(self, error: Exception) -> None:
        """Fails every present and future call with `error`."""
        if self._broken is None:
            self._broken = error
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        calls = [call for w in self.workers for call in (*w.state.queued.values(), *w.state.parked.values())]
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)
        self.queue.fail(error)

    # Deadlines

    def _tick(self) -> None:
        self._tick_handle = self._loop.call_later(TICK_SECONDS, self._tick)
        now = time.monotonic()
        # Time in which the driver's own event loop was blocked is not charged to calls.
        elapsed = min(now - self._last_tick, 2 * TICK_SECONDS)
        self._last_tick = now
        for worker in self.workers:
            if worker.process is None or worker.killed:
                continue
            if worker.ready:
                withdrawn = worker.watch(elapsed, self._timeout_seconds)
                if withdrawn:
                    self.queue.requeue(withdrawn)
                    self._schedule_pump()
            elif now - worker.process.started > self._start_timeout_seconds:
                worker.process.dump_stacks()
                self._loop.call_later(STACK_SECONDS, self._break_loading, worker, worker.process)

    def _break_loading(self, worker: PoolWorker, process: WorkerProcess) -> None:
        self._break(
            DeadlineExceeded(
                f"An environment worker was still {worker.loading} after {self._start_timeout_seconds:g} seconds; its "
                f"log ({process.log_path}) ends:\n{process.log_tail()}"
            )
        )
