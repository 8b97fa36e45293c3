"""The inference servers of a run: which are up, which weights they hold, and what happens when one dies.

Owns the state of each server and the lanes being open or closed on it. Processes are supervised by the server's own
actor (`inference.server`), weights are sent by `weight_sync`; this module notices, waits, and brings a server back:
restarted -> given the current weights -> open for samples. The run goes on with the others meanwhile.

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
from telescope.orchestrator.lanes import LanePool
from telescope.orchestrator.status import RunStatus

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often each server's actor is asked; a failed request asks at once."""


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
    bring_up: asyncio.Task[None] | None = None


class ServerPool:
    """All servers of the run. `bring_weights` is `WeightSync.sync_one`."""

    def __init__(
        self,
        handles: Sequence[ServerHandle],
        clients: list[EngineClient],
        lanes: LanePool,
        status: RunStatus,
        *,
        start_timeout: float,
        bring_weights: BringWeights,
    ) -> None:
        self._servers = [_Server(handle, client) for handle, client in zip(handles, clients, strict=True)]
        self._lanes = lanes
        self._status = status
        self._start_timeout = start_timeout
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
        self._status.messages.append(f"server {index} is down: {reason[:120]}")
        self._wake.set()

    def report_failure(self, index: int, error: InfrastructureError) -> None:
        """A request failed for a reason that is not its own: look at the server now, and keep prompts away from it."""
        self.close(index, str(error))

    async def watch(self) -> None:
        """Notice dead servers within seconds and bring them back, for ever. Raises when none can come back."""
        while True:
            for index, server in enumerate(self._servers):
                if server.failed is not None or (server.bring_up is not None and not server.bring_up.done()):
                    continue
                if server.bring_up is not None:
                    server.bring_up.result()  # a bug in bringing up ends the run
                    server.bring_up = None
                status = await server.handle.status()
                if status.restarts != server.num_restarts or status.state != "ready":
                    self.close(index, f"its process is {status.state} (restarts: {status.restarts})")
                if not server.up:
                    server.bring_up = asyncio.create_task(self._bring_up(index), name=f"bring up server {index}")
            if all(server.failed is not None for server in self._servers):
                reasons = "; ".join(f"server {i}: {server.failed}" for i, server in enumerate(self._servers))
                raise InfrastructureError(f"no inference server is left. {reasons}")
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue  # the regular poll

    async def _bring_up(self, index: int) -> None:
        """Wait until the process answers, send it the current weights, open its lanes."""
        server = self._servers[index]
        try:
            async with asyncio.timeout(self._start_timeout):
                while True:
                    status = await server.handle.status()
                    if status.state == "failed":
                        server.failed = status.error or f"gave up after {status.restarts} restarts"
                        self._status.set_part(f"server {index}", "failed for good")
                        logger.error("inference server %d failed for good: %s", index, server.failed)
                        return
                    if status.state == "ready" and await server.client.health():
                        break
                    self._status.set_part(f"server {index}", f"restarting ({status.state})")
                    await asyncio.sleep(POLL_SECONDS / 4)
        except TimeoutError:
            raise DeadlineExceeded(
                f"restart of inference server {index} took longer than inference_start_timeout_seconds = "
                f"{self._start_timeout:g} s; last state: {status.state}; see its log in the run directory"
            ) from None
        fresh, server.num_restarts = status.restarts != server.num_restarts, status.restarts
        self._status.set_part(f"server {index}", "receiving weights")
        try:
            await self._bring_weights(index, lambda: self.open(index), fresh=fresh)
        except InfrastructureError as error:
            logger.warning("inference server %d failed again while it was given weights: %s", index, error)
            return
        logger.info("inference server %d is back (restarts: %d)", index, status.restarts)
        self._status.messages.append(f"server {index} is back with the current weights")
