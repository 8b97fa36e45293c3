"""The inference servers of a run: which are up, which weights they hold, and what happens when one dies.

Owns the state of each server and the lanes being open or closed on it. Processes are supervised by the server's own
actor (`inference.server`), weights are sent by `weight_sync`; this module notices, waits, and brings a server back:
restarted -> given the current weights -> open for samples. The run goes on with the others meanwhile.

A server that cannot come back is given up, and the run goes on with the others; it ends when none is left.

Invariant: a server's lanes are open only while its process answers and holds the newest synced weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope.errors import DeadlineExceeded, InfrastructureError
from telescope.inference.client import EngineClient
from telescope.orchestrator.request_slots import RequestSlotPool
from telescope.orchestrator.status import RunStatus
from telescope.utils.text import single_line

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often each server's actor is asked; a failed request asks at once."""

MAX_FAILED_BRING_UPS = 5
"""Times in a row that a server may fail while it is given weights. Its process lives, so nobody else restarts it;
asking for ever would let a run with one server stand still."""


class ServerHandle(Protocol):
    """The actor that supervises one vLLM process."""

    async def status(self) -> Any: ...

    async def dump_stacks(self) -> str: ...


class BringWeights(Protocol):
    """Brings the newest weights into one server, and calls `on_held` once it holds them."""

    def __call__(self, server: int, on_held: Callable[[], None], *, fresh: bool) -> Awaitable[None]: ...


@dataclass
class _Server:
    handle: ServerHandle
    client: EngineClient
    num_restarts: int = 0
    up: bool = False
    failed: str | None = None
    num_failed_bring_ups: int = 0
    bring_up: asyncio.Task[None] | None = None


class ServerPool:
    """All servers of the run. `bring_weights` is `WeightSync.sync_one`."""

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        clients: list[EngineClient],
        lanes: RequestSlotPool,
        status: RunStatus,
        *,
        start_timeout: float,
        hang_timeout: float,
        bring_weights: BringWeights,
    ) -> None:
        self._servers = [_Server(handle, client) for handle, client in zip(handles, clients, strict=True)]
        self._lanes = lanes
        self._status = status
        self._start_timeout = start_timeout
        self._hang_timeout = hang_timeout
        self._bring_weights = bring_weights
        self._wake = asyncio.Event()

    @property
    def clients(self) -> list[EngineClient]:
        return [server.client for server in self._servers]

    @property
    def up(self) -> list[int]:
        """Indices of the servers that take samples and weight syncs."""
        return [index for index, server in enumerate(self._servers) if server.up]

    def open(self, index: int) -> None:
        """The server answers and holds the newest weights: samples may go there."""
        self._servers[index].up = True
        self._lanes.set_up(index, True)
        self._status.set_part(f"server {index}", "serving")

    def close(self, index: int, reason: str) -> None:
        """No further samples go to this server until it is brought up again."""
        if not self._servers[index].up:
            return
        logger.warning("inference server %d is taken out: %s", index, reason)
        self._servers[index].up = False
        self._lanes.set_up(index, False)
        self._status.set_part(f"server {index}", f"down: {reason[:80]}")
        self._status.messages.append(f"server {index} is down: {single_line(reason)}")
        self._wake.set()

    def report_failure(self, index: int, error: InfrastructureError) -> None:
        """A request failed for a reason that is not its own: look at the server now, and keep prompts away from it."""
        self.close(index, str(error))

    async def watch(self) -> None:
        """Notice dead servers within seconds and bring them back, for ever.

        Raises InfrastructureError when no server is left.
        """
        try:
            await self._watch()
        finally:
            tasks = [server.bring_up for server in self._servers if server.bring_up is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for index in range(len(self._servers)):
                await self._look_at(index)
            if all(server.failed is not None for server in self._servers):
                reasons = "; ".join(f"server {i}: {server.failed}" for i, server in enumerate(self._servers))
                raise InfrastructureError(f"no inference server is left. {reasons}")
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue  # the regular poll

    async def _look_at(self, index: int) -> None:
        """Close a server that is not what it was, and begin to bring up one that is out."""
        server = self._servers[index]
        if server.failed is not None or (server.bring_up is not None and not server.bring_up.done()):
            return
        if server.bring_up is not None:
            server.bring_up.result()  # a bug in bringing up ends the run
            server.bring_up = None
        try:
            status = await server.handle.status()
        except (InfrastructureError, DeadlineExceeded) as error:
            self._give_up(index, str(error))
            return
        if status.restarts != server.num_restarts or status.state != "ready":
            why = f": {status.error}" if status.error else ""
            self.close(index, f"its process is {status.state} (restarts: {status.restarts}){why}")
        if not server.up:
            server.bring_up = asyncio.create_task(self._bring_up(index), name=f"bring up server {index}")

    def _give_up(self, index: int, reason: str) -> None:
        """This server takes no further part in the run."""
        self.close(index, reason)
        self._servers[index].failed = reason
        self._status.set_part(f"server {index}", "failed for good")
        self._status.messages.append(f"server {index} failed for good: {single_line(reason)}")
        logger.error("inference server %d failed for good: %s", index, reason)
        self._wake.set()

    async def _bring_up(self, index: int) -> None:
        """Wait until the process answers, send it the current weights, open its lanes."""
        server = self._servers[index]
        state = "not known"
        try:
            # An engine that hangs is not brought up, and is restarted when its server has noticed.
            async with asyncio.timeout(self._start_timeout + self._hang_timeout):
                while True:
                    status = await server.handle.status()
                    state = status.state
                    if status.state == "failed":
                        self._give_up(index, status.error or f"gave up after {status.restarts} restarts")
                        return
                    if status.state == "ready" and await server.client.health():
                        break
                    self._status.set_part(f"server {index}", f"restarting ({status.state})")
                    await asyncio.sleep(POLL_SECONDS / 4)
        except TimeoutError:
            self._give_up(
                index,
                f"it did not come back within inference_start_timeout_seconds = {self._start_timeout:g} s and the "
                f"{self._hang_timeout:g} s in which an engine that hangs is noticed (inference_hang_timeout_seconds, "
                "or weight_sync_timeout_seconds where that is longer); "
                f"last state: {state}; see its log in the run directory",
            )
            return
        except (InfrastructureError, DeadlineExceeded) as error:
            self._give_up(index, str(error))
            return
        fresh, server.num_restarts = status.restarts != server.num_restarts, status.restarts
        self._status.set_part(f"server {index}", "receiving weights")
        try:
            await self._bring_weights(index, lambda: self.open(index), fresh=fresh)
        except InfrastructureError as error:
            logger.warning("inference server %d failed again while it was given weights: %s", index, error)
            server.num_failed_bring_ups += 1
            if server.num_failed_bring_ups >= MAX_FAILED_BRING_UPS:
                times = server.num_failed_bring_ups
                self._give_up(index, f"it failed {times} times in a row while it was given weights, last: {error}")
            return
        server.num_failed_bring_ups = 0
        logger.info(
            "inference server %d is back (restarts: %d, its start took %.1f s)",
            index, status.restarts, status.start_seconds or 0.0,
        )  # fmt: skip
        why = f" (restarted: {single_line(status.error)})" if fresh and status.error else ""
        self._status.messages.append(f"server {index} is back with the current weights{why}")
