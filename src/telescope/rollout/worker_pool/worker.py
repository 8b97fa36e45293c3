"""The worker process that runs users' environment code.

The fork server forks it; the driver talks to it over one socket, and may kill it at any moment. Synchronous user
functions run in the main thread, one at a time, outside any event loop, so that they may call `asyncio.run` themselves.
Awaitables that they return run concurrently in this process's event loop between such calls. A request may alternate
between both (`user_code`).

Invariants:
- Output of user code goes to the log; only frames go to the socket.
- Before any step into user code the slot names its request (`messages.Slot`), whichever task takes the step.
- The answer to a request is written to the socket before the next request starts.
- The process exits when its socket is closed, or, while user code runs, by the kernel's signal (`fork_server`).
- A copy of the process that user code forks exits when that user code returns, and never answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from telescope.environments.serialization import MalformedResultError
from telescope.environments.types import EnvironmentSpec
from telescope.environments.user_code import Steps, error_text, maybe_await, original_error, user_code_line
from telescope.errors import InfrastructureError, UnreachableError, UserError
from telescope.rollout.rendering import Renderer
from telescope.rollout.worker_pool.environment_runner import EnvironmentRunner
from telescope.rollout.worker_pool.messages import Slot
from telescope.utils.frames import FrameReader, pack_frame

RECHECK_SECONDS = 0.002
"""After a call longer than this, the worker reads withdrawals from the socket before it starts the next one."""
MAX_ANSWER_BYTES = 32 * 2**20
"""Largest answer, because it passes through the driver's memory into the record."""
CLOSE_SECONDS = 20.0
"""Time for the environments to end rollouts and close resources after the driver has closed the socket."""

_request: ContextVar[int] = ContextVar("request", default=0)


@types.coroutine
def _steps_of(coroutine: Coroutine[Any, Any, Any], request_id: int, worker: Worker) -> Generator[Any, Any, Any]:
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    while True:
        with worker.on_main_thread(request_id):
            try:
                waits_for = step(argument)
            except StopIteration as end:
                return end.value
            except (SystemExit, KeyboardInterrupt) as error:
                # asyncio would let these end the process, with the other rollouts in it.
                raise RuntimeError(f"user code raised {type(error).__name__}") from error
        try:
            step, argument = coroutine.send, (yield waits_for)
        except BaseException as error:
            step, argument = coroutine.throw, error


async def _attributed(coroutine: Coroutine[Any, Any, Any], request_id: int, worker: Worker) -> Any:
    """Runs a coroutine; names its request in the slot during each step."""
    return await _steps_of(coroutine, request_id, worker)


class Worker:
    """Reads requests, runs them, writes answers."""

    def __init__(self, connection: socket.socket, slot: Slot, renderer: Renderer | None) -> None:
        self.connection = connection
        self.pid = os.getpid()
        self.slot = slot
        self.reader = FrameReader()
        self.inbox: deque[tuple[dict[str, Any], bytes]] = deque()
        self.withdrawn: set[int] = set()
        self.ended = False
        self.begun: dict[int, float] = {}
        self.busy: dict[int, float] = {}
        """Seconds on the main thread of each running request."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._make_task)
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.resumable: deque[tuple[int, Steps, asyncio.Task[Any]]] = deque()
        """Requests whose wait in the event loop is over, ready for their next step."""
        self.parked: set[int] = set()
        """Requests that were reported to the driver as waiting in the event loop."""
        self.renderer = renderer
        self.runner: EnvironmentRunner

    @contextmanager
    def on_main_thread(self, request_id: int) -> Iterator[None]:
        """Context in which a request occupies the main thread. Adds up the time."""
        self.slot.enter(request_id)
        started = time.perf_counter()
        try:
            yield
        finally:
            if os.getpid() != self.pid:
                os._exit(1)  # a copy forked by user code, which would read the worker's requests
            self.slot.leave()
            if request_id in self.busy:
                self.busy[request_id] += time.perf_counter() - started

    def serve(self) -> None:
        """Serves until the stream ends. The first frame names what to load."""
        asyncio.set_event_loop(self.loop)
        while not self.inbox and not self.ended:
            self.receive(wait=True)
        if self.ended:
            return
        header, _ = self.inbox.popleft()
        if not self._load(header):
            return
        self.loop.add_reader(self.connection.fileno(), self._readable)
        while not self.ended:
            if self.resumable:
                self._resume(*self.resumable.popleft())
            elif self.inbox:
                header, blob = self.inbox.popleft()
                self._handle(header, blob)
                if self.tasks:
                    self.loop.call_soon(self.loop.stop)  # one iteration
                    self.loop.run_forever()
            else:
                self.loop.run_forever()  # until _readable or _settled stops it
        self._close()

    def receive(self, *, wait: bool) -> None:
        """Moves received requests to the inbox."""
        try:
            data = self.connection.recv(2**20) if wait else self.connection.recv(2**20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
        for header, blob in self.reader.feed(data):
            if header["op"] == "withdraw":
                self.withdrawn.update(header["ids"])
            elif header["op"] == "cancel":
                if header["id"] in self.tasks:
                    self.tasks[header["id"]].cancel()
            else:
                self.inbox.append((header, blob))

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        self._send_frame(pack_frame(header, blob))

    def _send_frame(self, frame: bytes) -> None:
        try:
            self.connection.sendall(frame)
        except (BrokenPipeError, ConnectionResetError):
            self.ended = True  # the driver is gone; the kernel ends this process too
            self.loop.stop()

    def _readable(self) -> None:
        try:
            self.receive(wait=False)
        except Exception:  # the loop would log it and continue with a broken stream
            traceback.print_exc()
            self.ended = True
        if self.inbox or self.ended:
            self.loop.stop()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Attributes tasks that user code starts to the request that started them."""
        request_id = _request.get()
        if request_id and asyncio.iscoroutine(coroutine):
            coroutine = _attributed(coroutine, request_id, self)
        return asyncio.Task(coroutine, loop=loop, **options)

    def _load(self, header: dict[str, Any]) -> bool:
        started = time.perf_counter()
        if header["debug"]:
            logging.getLogger().setLevel(logging.DEBUG)
        try:
            specs = [EnvironmentSpec(**fields) for fields in header["specs"]]
            self.runner = EnvironmentRunner(
                specs,
                self.renderer,
                header["environments_path"],
                on_stage=lambda stage, doing: self.send({"loading": doing, "stage": stage}),  # user code may hang
            )
            trial = header["trial"]
            checks = {"checks_golds": trial, "checks_template": header["checks_template"]}
            infos = [asdict(self.runner.describe(position, **checks)) for position in range(len(specs))]
            if not trial:
                self.runner.prepare_own_resources()
        except UserError as error:
            reachable = not isinstance(error, UnreachableError)
            self.send({"failed": str(error), "user_error": True, "reachable": reachable})
            return False
        except BaseException as error:
            _print(error)
            self.send({"failed": _describe(error), "user_error": False})
            return False
        # Data may grow by the limit, after which allocations fail.
        with open("/proc/self/status", encoding="ascii") as status:
            used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        limit = used + header["memory_limit_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self.send({"ready": infos, "seconds": time.perf_counter() - started})
        return True

    def _handle(self, header: dict[str, Any], blob: bytes) -> None:
        request_id = header["id"]
        if self.withdrawn:
            withdrawn = request_id in self.withdrawn
            self.withdrawn = {other for other in self.withdrawn if other > request_id}  # ids are rising
            if withdrawn:
                return
        self.busy[request_id] = 0.0
        started = self.begun[request_id] = time.perf_counter()
        steps = self.runner.execute(header, blob)
        self._step(request_id, steps, lambda: next(steps))
        if time.perf_counter() - started > RECHECK_SECONDS:
            self.receive(wait=False)

    def _resume(self, request_id: int, steps: Steps, task: asyncio.Task[Any]) -> None:
        """Continues a request whose awaitable has a result or has failed."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._step(request_id, steps, lambda: steps.send(task.result()) if error is None else steps.throw(error))

    def _step(self, request_id: int, steps: Steps, resume: Callable[[], Awaitable[Any]]) -> None:
        """Runs a request up to its next wait, or to its end."""
        token = _request.set(request_id)
        asyncio.set_event_loop(self.loop)  # asyncio.run in user code removes it
        try:
            with self.on_main_thread(request_id):
                waits_for = resume()
            task = self.loop.create_task(maybe_await(waits_for))  # waits while other requests run
            self.tasks[request_id] = task
            task.add_done_callback(lambda done: self._settled(request_id, steps, done))
            if request_id not in self.parked:
                self.parked.add(request_id)
                self.send({"parked": request_id, "busy": self.busy[request_id]})
        except StopIteration as end:
            self._answer(request_id, *end.value)
        except BaseException as error:
            self._fail(request_id, error)
        finally:
            _request.reset(token)

    def _settled(self, request_id: int, steps: Steps, task: asyncio.Task[Any]) -> None:
        """Schedules the next step, which runs outside the event loop."""
        del self.tasks[request_id]
        self.resumable.append((request_id, steps, task))
        if not self.ended:
            self.loop.stop()

    def _close(self) -> None:
        self.loop.remove_reader(self.connection.fileno())  # it is at its end, and would stop the loop
        try:
            self.loop.run_until_complete(asyncio.wait_for(self.runner.close(), CLOSE_SECONDS))
        except TimeoutError:
            logging.getLogger(__name__).warning("Ending rollouts and resources took over %g seconds", CLOSE_SECONDS)

    def _answer(self, request_id: int, fields: dict[str, Any], blob: bytes = b"") -> None:
        times = self._times(request_id)
        frame = pack_frame({"id": request_id, "result": fields, **times}, blob)
        if len(frame) > MAX_ANSWER_BYTES:
            problem = f"the environment's result has {len(frame)} bytes; the limit is {MAX_ANSWER_BYTES}"
            self.send({"id": request_id, "failed": problem, "infrastructure": False, **times})
            return
        self._send_frame(frame)

    def _fail(self, request_id: int, error: BaseException) -> None:
        _print(error)
        infrastructure = isinstance(error, InfrastructureError)
        failed = {"failed": _describe(error), "infrastructure": infrastructure}
        self.send({"id": request_id, **failed, **self._times(request_id)})

    def _times(self, request_id: int) -> dict[str, float]:
        """Ends the timing of a request. `busy` is seconds on the main thread, `seconds` is since its start."""
        self.parked.discard(request_id)
        seconds = time.perf_counter() - self.begun.pop(request_id)
        return {"busy": self.busy.pop(request_id), "seconds": seconds}


def _describe(error: BaseException) -> str:
    """Returns the error with the file and the line of its origin.

    A malformed result has no line in user code, and the line of ours that rejects it does not help.
    """
    error = original_error(error)
    where = None if isinstance(error, MalformedResultError) else user_code_line(error)
    return error_text(error) + (f" ({os.path.basename(where)})" if where else "")


def _print(error: BaseException) -> None:
    """Prints the traceback to the log."""
    try:
        traceback.print_exception(error)
    except Exception as worse:  # printing it may run the user's code
        print(f"{error_text(error)} (its traceback cannot be printed: {error_text(worse)})", file=sys.stderr)


def run_worker(descriptor: int, slot_descriptor: int, renderer: Renderer | None) -> None:
    """Serves on the socket until it is closed. Called in a forked process (`fork_server`)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # the OOM killer's first choice
    except OSError as error:
        logging.getLogger(__name__).info("The OOM killer's preference could not be set: %s", error)
    slot = Slot(slot_descriptor)
    os.close(slot_descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    Worker(connection, slot, renderer).serve()
