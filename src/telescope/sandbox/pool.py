"""A pool that creates sandboxes before they are needed, and a sandbox of the pool as a rollout uses it.

At most `pool_size` sandboxes exist at a time, in use or ready. A lost sandbox is replaced, and its user gets an error
that counts as infrastructure. Every sandbox is in the run's ledger before it is used.

A pool belongs to the event loop that starts it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
import signal
import time
from collections.abc import Coroutine, Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from telescope.errors import UserError
from telescope.sandbox.activity import SAMPLE, measured
from telescope.sandbox.base import ENDPOINT_PORT, ExecResult, SandboxConfig, SandboxHandle, SandboxProvider
from telescope.sandbox.errors import (
    SandboxBusyError,
    SandboxCommandTimeoutError,
    SandboxError,
    SandboxSetupError,
)
from telescope.sandbox.ledger import SandboxLedger
from telescope.utils.process import describe_exit
from telescope.utils.text import plain, single_line

logger = logging.getLogger(__name__)

CREATE_ATTEMPTS = 5
DESTROY_ATTEMPTS = 3
FIRST_PAUSE_SECONDS = 1.0
"""Pause after the first failure, doubled after each further one."""
CHECK_SECONDS = 10.0
"""A sandbox that has been ready for longer is checked before use, and one that a user released at once."""
LEAST_LIFE = 0.25
"""Share of its life that a sandbox must have left to be handed out."""
ENDPOINT_INSIDE = f"http://127.0.0.1:{ENDPOINT_PORT}"
"""URL of the agents' endpoint inside a local sandbox."""


class GenericSandboxPool:
    """Sandboxes of one provider with one configuration.

    `max_concurrent_creates` limits concurrent creations. With `reuse` a released sandbox is handed out again with the
    files and processes of its last user; the default is to reuse only where creation is slow
    (`SandboxProvider.is_reusable`).
    """

    def __init__(
        self,
        provider: SandboxProvider,
        config: SandboxConfig,
        pool_size: int = 10,
        max_concurrent_creates: int = 100,
        *,
        reuse: bool | None = None,
    ) -> None:
        for name, value in (("pool_size", pool_size), ("max_concurrent_creates", max_concurrent_creates)):
            if value < 1:
                raise UserError(f"{name}={value} of a pool of sandboxes must be at least 1")
        self.ledger = SandboxLedger.of_process()
        self.provider, self.name, self.pool_size = provider, provider.name, pool_size
        self.config = replace(config, extra={"run": self.ledger.run, **config.extra})
        self.ready_queue: asyncio.Queue[SandboxHandle | Exception] = asyncio.Queue()
        """Sandboxes that are ready, and errors of failed creations."""
        self.in_use_sandboxes: set[SandboxHandle] = set()
        self.all_sandboxes: dict[SandboxHandle, float] = {}
        """Creation time of each sandbox, by `time.monotonic()`."""
        self.wait_seconds: float | None = None
        """Default timeout of `acquire`."""
        self._reuse = provider.is_reusable if reuse is None else reuse
        self._ready_since: dict[SandboxHandle, float] = {}
        self._creating = asyncio.Semaphore(max_concurrent_creates)
        self._next_create = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_creating = 0
        self._num_waiting = 0
        self._last_error = ""  # of a creation
        self._is_open = False

    async def start(self) -> None:
        """Starts creating sandboxes and waits until the first is ready. Raises the error of its creation."""
        self._is_open = True
        try:
            await self.release(await self._take(), reuse=True)
        except BaseException:
            await self.shutdown()
            raise

    @partial(measured, "queue")
    async def acquire(self, timeout: float | None = None) -> SandboxHandle:
        """Returns a running sandbox. Raises `SandboxError` if none becomes free within `timeout` seconds."""
        timeout = self.wait_seconds if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):
                return await self._take()
        except TimeoutError:
            num_used = len(self.in_use_sandboxes)
            fix = "Raise pool_size" if num_used == self.pool_size else "The others are not created yet"
            in_use = f"{num_used} of {self.pool_size} are in use. {fix}"
            raise SandboxError(f"no sandbox of {self.name!r} was free within {timeout:g} s: {in_use}") from None

    async def release(self, handle: SandboxHandle, *, reuse: bool = False) -> None:
        """Returns a sandbox to the pool. It is reused if `reuse` is set here or for the pool, else replaced.

        A caller that sets `reuse` here knows that it is alive. Otherwise it is checked before it is handed out again,
        because it may have ended during its use.
        """
        if handle not in self.in_use_sandboxes:
            return
        if not (self._reuse or reuse):
            await self.remove(handle)
            return
        self.in_use_sandboxes.discard(handle)
        self._ready(handle, is_checked=reuse)

    async def remove(self, handle: SandboxHandle) -> None:
        """Destroys and replaces a sandbox. Returns at once."""
        if self.all_sandboxes.pop(handle, None) is None:
            return
        self.in_use_sandboxes.discard(handle)
        self._spawn(self._destroy(handle))
        self._refill()

    async def shutdown(self) -> None:
        """Destroys all sandboxes, including those under creation."""
        self._is_open = False
        for task in list(self._tasks):
            if task.get_name() == "create":
                task.cancel()
        handles, self.all_sandboxes = list(self.all_sandboxes), {}
        self.in_use_sandboxes.clear()
        while not self.ready_queue.empty():
            self.ready_queue.get_nowait()
        await asyncio.gather(*self._tasks, *(self._destroy(handle) for handle in handles), return_exceptions=True)
        for _ in range(self._num_waiting):
            self.ready_queue.put_nowait(SandboxError("the pool of sandboxes has ended"))

    async def _take(self) -> SandboxHandle:
        """Returns a ready sandbox that is alive and has enough lifetime left."""
        while True:
            if not self._is_open:  # it may end while a sandbox is checked
                raise SandboxError("the pool of sandboxes has not started, or has ended")
            self._num_waiting += 1
            try:
                self._refill()
                found = await self.ready_queue.get()
            finally:
                self._num_waiting -= 1
            if isinstance(found, Exception):
                raise found
            self.in_use_sandboxes.add(found)
            now = time.monotonic()
            age = now - self.all_sandboxes.get(found, now)
            try:
                if age <= self.config.timeout_seconds * (1 - LEAST_LIFE) and (
                    now - self._ready_since.pop(found, now) < CHECK_SECONDS or await self.provider.is_alive(found)
                ):
                    return found
            except BaseException:
                await self.remove(found)
                raise
            logger.info("sandbox %s has ended, or is about to: another one takes its place", found.id)
            await self.remove(found)

    def _ready(self, handle: SandboxHandle, *, is_checked: bool = True) -> None:
        self._ready_since[handle] = time.monotonic() if is_checked else -math.inf
        self.ready_queue.put_nowait(handle)

    def _refill(self) -> None:
        while self._is_open and len(self.all_sandboxes) + self._num_creating < self.pool_size:
            self._num_creating += 1
            self._spawn(self._create(), "create")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str = "destroy") -> None:
        context = copy_context()
        context.run(SAMPLE.set, "")  # a new sandbox does not belong to the current sample
        task = asyncio.get_running_loop().create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _create(self) -> None:
        """Creates a sandbox. Passes an error to a waiting `acquire`, if there is one."""
        try:
            async with self._creating:
                handle = await self._create_with_retries()
            self.ledger.opened(self.provider, handle)
            self.all_sandboxes[handle] = time.monotonic()
            self._ready(handle)
        except Exception as error:
            if self._num_waiting > self.ready_queue.qsize():
                self.ready_queue.put_nowait(error)
            elif str(error) != self._last_error:  # every creation may have it
                logger.warning("A sandbox of %s cannot be created: %s", self.provider.name, error)
            self._last_error = str(error)
            if self._num_waiting > self.ready_queue.qsize():
                asyncio.get_running_loop().call_soon(self._refill)  # for other waiting calls
        finally:
            self._num_creating -= 1

    async def _create_with_retries(self) -> SandboxHandle:
        pauses = [FIRST_PAUSE_SECONDS * 2**attempt for attempt in range(CREATE_ATTEMPTS - 1)]
        interval = 1 / self.provider.creates_per_second
        while True:
            now = time.monotonic()
            start = max(now, self._next_create)
            self._next_create = start + interval
            await asyncio.sleep(start - now)
            try:
                return await self.provider.create(self.config)
            except SandboxBusyError as error:
                if not pauses:
                    raise
                logger.info("%s; trying again in %g s", error, pauses[0])
                await asyncio.sleep(pauses.pop(0))

    async def _destroy(self, handle: SandboxHandle) -> None:
        """Destroys a sandbox. If that fails, it stays in the ledger for `telescope sandbox reap`."""
        for attempt in range(1, DESTROY_ATTEMPTS + 1):
            try:
                await self.provider.destroy(handle)
                self.ledger.closed(handle)
                return
            except Exception as error:
                if attempt == DESTROY_ATTEMPTS:
                    logger.warning("The sandbox %s cannot be destroyed: %s", handle.id, error)
                else:
                    await asyncio.sleep(FIRST_PAUSE_SECONDS * attempt)


def _describe_failure(command: str, result: ExecResult) -> str:
    number = result.exit_code - 128
    end = describe_exit(-number if number in signal.valid_signals() else result.exit_code)
    output = plain(f"{result.stdout.strip()[-200:]}\n{result.stderr.strip()[-200:]}").strip()
    return f"`{single_line(command)[:80]}` {end}{output and f': {output}'}"


class Sandbox:
    """A sandbox from a pool. `endpoint` is the URL of the agents' endpoint on the host."""

    def __init__(self, pool: GenericSandboxPool, handle: SandboxHandle, *, endpoint: str = "") -> None:
        self.pool, self.handle = pool, handle
        self._endpoint = endpoint.removesuffix("/v1")
        self.program_error: str | None = None
        """How the last command failed, or None if it did not."""

    async def run(
        self, command: str, *, env: Mapping[str, str] | None = None, timeout: float = 60, cwd: str | None = None
    ) -> ExecResult:
        """Runs a shell command with the variables in `env`.

        Endpoint URLs in them are replaced by the URL inside the sandbox. Raises `SandboxCommandTimeoutError` after
        `timeout` seconds.
        """
        if not isinstance(command, str):
            raise UserError(f"run got {command!r:.80}: give the text of a shell command (shlex.join)")
        variables = {name: self._inside(str(value)) for name, value in (env or {}).items()}
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
        try:
            result = await self.pool.provider.execute(self.handle, exports + command, timeout=timeout, working_dir=cwd)
        except SandboxCommandTimeoutError as late:  # its message would begin with the variables, and show their keys
            raise SandboxCommandTimeoutError(command, late.timeout, late.sandbox_id) from None
        self.program_error = _describe_failure(command, result) if result.exit_code else None
        return result

    async def write(self, path: str, content: str | bytes) -> None:
        """Writes a file and creates its parent folders."""
        data = content.encode() if isinstance(content, str) else content
        await self.pool.provider.upload_bytes(self.handle, path, data)

    async def read(self, path: str) -> bytes:
        """Returns the content of a file. Raises `SandboxError` if it is missing."""
        return await self.pool.provider.read_bytes(self.handle, path)

    async def close(self) -> None:
        """Destroys the sandbox."""
        await self.pool.remove(self.handle)

    def _inside(self, value: str) -> str:
        if not self._endpoint or not value.startswith(self._endpoint):
            return value
        if "endpoint" not in self.pool.config.extra:
            raise SandboxSetupError(
                f"a sandbox of {self.pool.name!r} cannot reach the endpoint of a rollout: run the agent in the rollout "
                "worker, or in a `local` sandbox"
            )
        return ENDPOINT_INSIDE + value.removeprefix(self._endpoint)
