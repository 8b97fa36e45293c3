"""Tracks the state of a run's inference servers, and recovers them after failures.

Owns the state of each server and whether its request slots are open. The server's own actor supervises its process
(`inference.server`), and `weight_sync` sends weights; this module detects failures and brings a server back: restarted
-> current weights loaded -> open for samples. The run continues with the other servers meanwhile.

A server that cannot come back is abandoned; the run ends when none is left.

The last servers can be dedicated to evals: they serve no rollouts. An eval leases its servers, which then receive no
weights until it ends, so that all of its tokens have one policy version.

Invariant: a server's slots are open only while its process responds and has loaded the newest synced weights, or the
weights of the eval that leases it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING

from telescope.environments.user_code import gather_or_cancel
from telescope.errors import DeadlineExceeded, InfrastructureError, RankLost
from telescope.inference.base import EngineBackend
from telescope.orchestrator.status import RunStatus
from telescope.rollout.pool import Lane
from telescope.utils.text import single_line

if TYPE_CHECKING:
    from telescope.cluster.inference_group import ActorHandle

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # Poll interval of each server's actor. A failed request polls at once.

MAX_FAILED_BRING_UPS = 5
"""Consecutive failures to receive weights after which a server is abandoned. Its process runs, so its actor does not
restart it, and unlimited retries would stall a run with one server."""


@dataclass
class _Server:
    handle: ActorHandle
    client: EngineBackend
    num_restarts: int = 0
    up: bool = False
    failed: str | None = None
    num_failed_bring_ups: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to check the server at once."""


@dataclass(eq=False)
class EvalLease:
    """Servers that are reserved for an eval at one policy version.

    A server that comes back with other weights leaves the lease. `lost` is set when no server is left.
    """

    version: int
    servers: set[int]
    slots: Lane
    """The slots of servers that are up with the weights of `version` are open."""
    served: set[int] = field(default_factory=set)
    """Servers that have been open in this lease."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def set_up(self, server: int, up: bool) -> None:
        """Opens or closes a server for the samples of the eval."""
        self.slots.set_up(server, up)
        if up:
            self.served.add(server)

    async def fail_when_lost(self) -> None:
        """Raises InfrastructureError when no server is left."""
        await self.lost.wait()
        raise InfrastructureError(
            f"no server has version {self.version} any more: they failed, or restarted with newer weights"
        )

    def leave(self, server: int) -> None:
        """Closes a server that no longer has the weights of `version`."""
        self.servers.discard(server)
        self.slots.set_up(server, False)
        self.slots.share_slots_of(self.servers)
        if not self.servers:
            self.lost.set()


@dataclass(eq=False)
class ServerPool:
    """All servers of the run. Set `bring_weights` (`WeightSync.sync_one`) before `watch`.

    The last `num_dedicated` servers are for evals, which generate `eval_slots_per_server` samples per server at once.
    """

    handles: InitVar[Sequence[ActorHandle]]
    clients: Sequence[EngineBackend]
    slots: Lane
    status: RunStatus
    _: KW_ONLY
    start_timeout: float
    hang_timeout: float
    num_dedicated: InitVar[int] = 0
    eval_slots_per_server: int = 1
    bring_weights: Callable[..., Awaitable[None]] = field(init=False)

    def __post_init__(self, handles: Sequence[ActorHandle], num_dedicated: int) -> None:
        self.dedicated = frozenset(range(len(handles) - num_dedicated, len(handles)))
        """Servers that serve evals but no rollouts."""
        self._leases: dict[int, EvalLease] = {}
        self._lease_numbers = itertools.count()
        self._servers = [_Server(handle, client) for handle, client in zip(handles, self.clients, strict=True)]

    @property
    def up(self) -> list[int]:
        """Indices of the servers that serve samples."""
        return [index for index, server in enumerate(self._servers) if server.up]

    @property
    def synced(self) -> list[int]:
        """Indices of servers with weight syncs: up and not leased."""
        return [index for index in self.up if index not in self._leases]

    @property
    def num_slots_used_by_evals(self) -> int:
        return sum(lease.slots.num_used for lease in set(self._leases.values()))

    def open(self, index: int) -> None:
        """Opens a server that has the newest weights or the weights of its eval."""
        self._servers[index].up = True
        lease = self._leases.get(index)
        if lease is not None and self._servers[index].client.loaded_version != lease.version:
            self._leave_lease(index)
        elif lease is not None:
            lease.set_up(index, True)
        self.slots.set_up(index, index not in self.dedicated)
        self.status.components[f"server {index}"] = "serving evals" if index in self.dedicated else "serving"

    async def lease(self, indices: Iterable[int], version: int, keys: Iterable[tuple[str, float]] = ()) -> EvalLease:
        """Leases servers to evals at `version`, which is the version of the trainer's weights.

        `keys` are the environments of the evals with their weights.

        A server that missed the last sync because of an earlier eval receives the weights first. A server that is down
        joins the lease when it comes back with this version.
        """
        chosen = [index for index in indices if self._servers[index].failed is None]
        await self.update(chosen, version)
        slots = [self.eval_slots_per_server] * len(self._servers)
        lane = self.slots.pool.open_lane(f"eval {next(self._lease_numbers)}", slots, servers=chosen, keys=keys)
        lease = EvalLease(version, set(chosen), lane)
        for index in chosen:
            self._leases[index] = lease
            if self._servers[index].up:
                self.open(index)
        if not lease.servers:
            lease.lost.set()
        return lease

    async def update(self, indices: Iterable[int], version: int) -> None:
        """Loads the current weights, of this version, into the servers that are up without them."""

        async def update(index: int) -> None:
            try:
                await self.bring_weights(index, lambda: None, fresh=False)
            except InfrastructureError as error:
                self.close(index, error)

        old = [index for index in indices if self._servers[index].client.loaded_version != version]
        await asyncio.gather(*(update(index) for index in old if self._servers[index].up))

    def release(self, lease: EvalLease) -> None:
        """Ends a lease, unless it has ended. The servers receive the next weight sync."""
        lease.slots.close()
        self._leases = {index: other for index, other in self._leases.items() if other is not lease}

    def _leave_lease(self, index: int) -> None:
        lease = self._leases.pop(index, None)
        if lease is not None:
            lease.leave(index)

    def close(self, index: int, reason: object) -> None:
        """Closes a server for samples until it is brought up again, and checks it at once."""
        if not self._servers[index].up:
            return
        self.status.report(f"server {index} is down: {reason}", "server", "warning", log=logger)
        self._servers[index].up = False
        self.slots.set_up(index, False)
        if index in self._leases:
            self._leases[index].set_up(index, False)
        self.status.components[f"server {index}"] = f"down: {str(reason)[:80]}"
        self._servers[index].wake.set()

    async def watch(self) -> None:
        """Brings failed servers back until it is cancelled. Raises `InfrastructureError` when none is left."""
        await gather_or_cancel(self._watch_one(index) for index in range(len(self._servers)))
        reasons = "; ".join(f"server {index}: {server.failed}" for index, server in enumerate(self._servers))
        raise InfrastructureError(f"no inference server is left. {reasons}")

    async def _watch_one(self, index: int) -> None:
        """Closes a server when it fails or restarts, and brings it up again, until it is abandoned."""
        server = self._servers[index]
        while server.failed is None:
            server.wake.clear()
            try:
                status = await server.handle.status()
            except (InfrastructureError, DeadlineExceeded) as error:
                self._abandon(index, str(error))
                return
            if status.restarts != server.num_restarts or status.state != "ready":
                why = f": {status.error}" if status.error else ""
                self.close(index, f"its process is {status.state} (restarts: {status.restarts}){why}")
            if not server.up:
                await self._bring_up(index)
            with contextlib.suppress(TimeoutError):  # the regular poll
                async with asyncio.timeout(POLL_SECONDS):
                    await server.wake.wait()

    def _abandon(self, index: int, reason: str) -> None:
        self.close(index, reason)
        self._leave_lease(index)
        self._servers[index].failed = reason
        self._servers[index].wake.set()
        self.status.components[f"server {index}"] = "failed permanently"
        self.status.report(f"server {index} failed permanently: {reason}", "server", "error", log=logger)
        left = [other for other, server in enumerate(self._servers) if server.failed is None]
        if self.dedicated.issuperset(left):  # no other server is left for rollouts
            self.dedicated = frozenset()
            for other in left:
                self._leave_lease(other)
                self.close(other, "it takes over the rollouts; no evals run during training from now on")
        self.slots.share_slots_of([other for other in left if other not in self.dedicated])

    async def _bring_up(self, index: int) -> None:
        """Waits for the process, sends weights, and opens its slots."""
        server = self._servers[index]
        state = "not known"
        try:
            # A hanging engine is restarted by its actor once the hang is detected.
            async with asyncio.timeout(self.start_timeout + self.hang_timeout):
                while True:
                    status = await server.handle.status()
                    state = status.state
                    if status.state == "failed":
                        self._abandon(index, status.error or f"gave up after {status.restarts} restarts")
                        return
                    if status.state == "ready" and await server.client.health():
                        break
                    self.status.components[f"server {index}"] = f"restarting ({status.state})"
                    await asyncio.sleep(POLL_SECONDS / 4)
        except TimeoutError:
            self._abandon(
                index,
                f"it did not come back within inference_start_timeout_seconds = {self.start_timeout:g} s plus the "
                f"{self.hang_timeout:g} s for detecting a hang (the longer of inference_hang_timeout_seconds and "
                f"weight_sync_timeout_seconds); last state: {state}; see its log in the run directory",
            )
            return
        except (InfrastructureError, DeadlineExceeded) as error:
            self._abandon(index, str(error))
            return
        fresh = status.restarts != server.num_restarts  # until a bring-up succeeds
        lease = self._leases.get(index)
        if lease is not None and not fresh and index in lease.served and server.client.loaded_version == lease.version:
            self.open(index)  # newer weights would end its eval
            return

        def on_loaded() -> None:
            server.num_restarts = status.restarts
            self.open(index)

        self.status.components[f"server {index}"] = "receiving weights"
        try:
            await self.bring_weights(index, on_loaded, fresh=fresh)
        except InfrastructureError as error:
            logger.warning("inference server %d failed again while it received weights: %s", index, error)
            server.num_failed_bring_ups += 1
            if server.num_failed_bring_ups >= MAX_FAILED_BRING_UPS:
                times = server.num_failed_bring_ups
                self._abandon(index, f"it failed {times} consecutive times while it received weights, last: {error}")
            return
        except RankLost:
            return  # the server returns once the ranks are back, or the run ends
        server.num_failed_bring_ups = 0
        logger.info(
            "inference server %d is back (restarts: %d, its start took %.1f s)",
            index, status.restarts, status.start_seconds or 0.0,
        )  # fmt: skip
        why = f" (restarted: {single_line(status.error)})" if fresh and status.error else ""
        self.status.report(f"server {index} is back with the current weights{why}", "server")
