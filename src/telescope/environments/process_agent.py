"""Environments that run in a separate process with its own Python, whose packages never enter this one.

`ProcessAgent` starts `command process_bridge.py BRIDGE` and exchanges JSON lines with it: tasks, requests with the URL
of the policy, rewards. A process that exits, or does not react to a cancellation, fails its tasks as environment
failures and is restarted, at most `MAX_STARTS` times without a finished task in between. It ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from telescope.environments.base import Environment, RewardResult, Sample
from telescope.environments.context import MODEL, RolloutContext
from telescope.environments.user_code import error_text
from telescope.errors import EnvironmentFailure, UserError
from telescope.sandbox.base import run_sync
from telescope.utils.child_guard import kill_group

MAX_STARTS = 3
START_SECONDS = 600.0
"""Time for a process to list its tasks. `uv run` may download its packages first."""
CANCEL_SECONDS = 10.0
"""Time for a process to confirm that it has cancelled a task."""
MAX_LINE_BYTES = 2**26
STDERR_LINES = 20


class ProcessAgent(Environment):
    """An environment whose tasks and agents run in another process.

    `command` starts a Python that has the packages, such as `[uv, run, --with, verifiers==0.4.0, python]` or the path
    of a virtual environment's Python. `options` are passed to the bridge. Subclasses name the file of their `bridge`.
    """

    task = ""
    bridge: ClassVar[Path]
    default_command: ClassVar[Sequence[str]] = ("python3",)
    resources_per: ClassVar[Literal["host", "process"]] = "process"

    def __init__(
        self, command: list[str] | None = None, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.command, self.options = list(command or self.default_command), dict(options or {})
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._starts_left = MAX_STARTS
        self._ids = map(str, itertools.count())

    def load_dataset(self, num_samples: int = -1, **_: Any) -> list[Sample]:
        """Lists the tasks with a temporary process. Raises `UserError`."""
        if shutil.which(self.command[0]) is None:
            raise UserError(
                f"{self.name!r} is started with {self.command[0]!r} (`command` of its kwargs), which is no program "
                "that can be found. Install it, or set `command` to a Python that has the packages, such as "
                "[/path/to/venv/bin/python]"
            )

        async def load() -> list[dict[str, Any]]:
            child = Child()
            try:
                return await child.start(self)
            finally:
                await child.close()

        try:
            tasks = run_sync(load())  # in another thread, because this one may run an event loop
        except EnvironmentFailure as error:
            raise UserError(
                f"The tasks of {self.name!r} cannot be listed with {self.command} (`command` of its kwargs): {error}"
            ) from error
        samples = [Sample(t["prompt"], t.get("answer") or "", {"id": t["id"], "info": t.get("info")}) for t in tasks]
        return samples if num_samples < 0 else samples[:num_samples]

    async def prepare_resources(self) -> None:
        """Starts the process."""
        await self._running()

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        """Runs the task with the policy in the process."""
        child = await self._running()
        request = {"id": next(self._ids), "task": sample.metadata["id"], "model": MODEL}
        request |= {"base_url": context.base_url, "api_key": context.api_key}
        result = await child.ask(request, context.seconds_left)
        self._starts_left = MAX_STARTS
        if result.get("error"):
            raise EnvironmentFailure(f"{self.name}: {result['error']}")
        return RewardResult(float(result["reward"]), sample_metrics=result.get("metrics") or {})

    async def _running(self) -> Child:
        async with self._starting:
            if self._child is None or self._child.has_ended:
                if not self._starts_left:
                    end = self._child.end_of_stderr() if self._child is not None else ""
                    raise EnvironmentFailure(f"{self.name} started {MAX_STARTS} times and finished no task: {end}")
                self._starts_left -= 1
                self._child = Child()
                await self._child.start(self)
            return self._child

    async def close_resources(self) -> None:
        """Ends the process."""
        if self._child is not None:
            await self._child.close()


class Child:
    """A process of a `ProcessAgent`."""

    _process: asyncio.subprocess.Process

    def __init__(self) -> None:
        self.has_ended = True  # until it has listed its tasks
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, agent: ProcessAgent) -> list[dict[str, Any]]:
        """Starts the process. Returns its tasks. Raises `EnvironmentFailure`."""
        guard = [sys.executable, "-m", "telescope.utils.child_guard", str(os.getpid()), "env", "-u", "PYTHONPATH"]
        main = str(Path(__file__).with_name("process_bridge.py"))
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        self._process = await asyncio.create_subprocess_exec(
            *guard, *agent.command, main, str(agent.bridge), start_new_session=True, limit=MAX_LINE_BYTES, **pipes
        )
        self._tasks = [asyncio.create_task(self._read_errors(agent.name))]
        self._send({"name": agent.task, "options": agent.options})
        tasks: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(START_SECONDS):
                while not (message := await self._message()).get("ready"):
                    tasks.append(message)
        except BaseException as error:  # a cancelled start must end its process too
            await self.close()
            if not isinstance(error, EOFError | ValueError | TimeoutError):
                raise
            known = {EOFError: "it ended", TimeoutError: f"{START_SECONDS:g} seconds passed"}
            why = known.get(type(error)) or f"it wrote no JSON ({error_text(error)})"
            raise EnvironmentFailure(f"{why} before it had listed its tasks: {self.end_of_stderr()}") from error
        self.has_ended = False
        self._tasks.append(asyncio.create_task(self._read_answers()))
        return tasks

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the reply to a request. Raises `EnvironmentFailure`. Cancels the task if the caller is cancelled."""
        key = request["id"]
        self._answers[key] = answer = asyncio.get_running_loop().create_future()
        self._send(request)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(answer)
        except TimeoutError:
            raise EnvironmentFailure(f"the task took over {seconds:.0f} seconds: {self.end_of_stderr()}") from None
        finally:
            if not answer.done():
                self._send({"cancel": key})
                watch = asyncio.create_task(self._kill_if_silent(answer))
                self._tasks.append(watch)
                watch.add_done_callback(self._tasks.remove)

    async def close(self) -> None:
        """Kills the process group."""
        self.has_ended = True
        if not hasattr(self, "_process"):  # its start was cancelled
            return
        kill_group(self._process.pid)
        await self._process.wait()
        await asyncio.wait(self._tasks[:1], timeout=1.0)  # for the last lines of its standard error
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EnvironmentFailure(f"its process ended: {self.end_of_stderr()}"))
                answer.exception()  # retrieved here, because its caller may be gone

    def end_of_stderr(self) -> str:
        """Returns the last lines of the process's standard error."""
        return "\n".join(self._stderr) or "it wrote nothing to standard error"

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # the reader notices that the process has exited
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _message(self) -> Any:
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            return json.loads(line)
        raise EOFError

    async def _read_answers(self) -> None:
        try:
            while True:
                message = await self._message()
                if (answer := self._answers.pop(message["id"], None)) and not answer.done():
                    answer.set_result(message)
        except (EOFError, ValueError):
            await self.close()

    async def _read_errors(self, name: str) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._stderr.append(line.decode("utf-8", "replace").rstrip())
            print(f"{name}: {self._stderr[-1]}", file=sys.stderr)

    async def _kill_if_silent(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        await asyncio.wait({answer}, timeout=CANCEL_SECONDS)
        if not answer.done():
            await self.close()
