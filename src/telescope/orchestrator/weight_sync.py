"""Sends the trainer's weights to the running engines, and verifies them.

Each server has its own communicator and takes these steps while the trainer's ranks gather and send:

    in place:      pause (running requests freeze) -> start update -> receive -> finish (version counted) -> resume
    overlapped:    receive (requests continue) ... complete -> start update -> pause -> finish (swap) -> resume
    adapter:       write a folder ... pause -> start and finish update (version counted) -> load the adapter -> resume

Adapters (`lora_sync: adapter`) reach the servers through a folder in the run directory, while the base weights stay.
Otherwise the server's workers report when they connect whether they support overlapped updates. Owns this order, the
connections, and the measurements.

Invariants: a sync holds the trainer's command queue, so syncs run one at a time and never during a training step. If a
server fails, the rest of the sync leaves it and its communicator out, without delaying other servers. A paused engine
is resumed or closed. A trainer failure ends the sync at once.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from telescope.cluster.trainer_group import TrainerGroup
from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded, InfrastructureError, RunError
from telescope.inference.base import EngineBackend
from telescope.utils.timeline import Span
from telescope.weights.plan import TensorMeta, UpdateInfo, make_update
from telescope.weights.probe import ProbeReport, compare

logger = logging.getLogger(__name__)


@dataclass
class ServerSync:
    """One server's part of a sync. Times in seconds; `failure` is None if the new weights are loaded."""

    server: int
    started_at: float = 0.0
    paused_at: float = 0.0
    resumed_at: float = 0.0
    transfer_started_at: float = 0.0
    transfer_seconds: float = 0.0
    background: bool = False
    """Whether the server received weights while serving requests, and paused for the swap only."""
    failure: str | None = None

    @property
    def pause_seconds(self) -> float:
        return max(self.resumed_at - self.paused_at, 0.0)


@dataclass
class SyncReport:
    """Measurements of one sync. The trainer's ranks were busy with it for `trainer_seconds`."""

    version: int
    started_at: float
    ended_at: float = 0.0
    trainer_seconds: float = 0.0
    num_bytes: int = 0
    servers: list[ServerSync] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    trainer_spans: list[Span] = field(default_factory=list)
    """Timeline of each trainer rank."""

    @property
    def updated_servers(self) -> list[int]:
        """Servers that have loaded the new weights."""
        return [server.server for server in self.servers if server.failure is None]

    def metrics(self) -> dict[str, float]:
        """Returns this sync's step metrics, for the slowest server and for each server."""
        done = [server for server in self.servers if server.failure is None]
        metrics = {
            "timing_weight_sync_total": self.ended_at - self.started_at,
            "timing_weight_sync_trainer_total": self.trainer_seconds,
            "timing_weight_sync_inference_total": max((s.pause_seconds for s in done), default=0.0),
            "weight_sync/bytes": float(self.num_bytes),
            "weight_sync/servers": float(len(done)),
            "weight_sync/background": float(sum(server.background for server in done)),
        }
        for server in done:
            metrics[f"weight_sync/pause_seconds/server_{server.server}"] = server.pause_seconds
            metrics[f"weight_sync/transfer_seconds/server_{server.server}"] = server.transfer_seconds
        return metrics


class WeightMismatch(RunError):
    """Raised if an engine has not loaded the weights that the trainer sent. The message names the tensors."""


@dataclass(eq=False)
class WeightSync:
    """Sends weights of the trainer group to engine clients."""

    config: TelescopeConfig
    trainer: TrainerGroup
    clients: Sequence[EngineBackend]
    _: KW_ONLY
    engines_up: Callable[[], list[int]]
    on_failure: Callable[[int, InfrastructureError], None]
    on_report: Callable[[SyncReport], None]
    probe_token_ids: list[int]
    adapters: Path | None = None
    """Folder for adapters, with `lora_sync: adapter`."""

    def __post_init__(self) -> None:
        self.adapters = None if self.adapters is None else self.adapters.absolute()
        self._connected: dict[int, bool] = {}
        """Whether each connected server receives in the background."""
        self._connected_ranks = self.trainer.num_replacements
        """How often the ranks had been replaced when the servers connected to them."""
        # Every server starts with the trainer's initial weights, but without an adapter.
        starts_current = range(len(self.clients)) if self.adapters is None else ()
        self._loaded: dict[int, tuple[int, int]] = dict.fromkeys(starts_current, self.trainer.weights_identity)
        """`weights_identity` of the weights that each server has loaded, if known."""
        self._metas: list[TensorMeta] | None = None
        self._num_syncs = 0
        self.last_probe: dict[int, ProbeReport] = {}

    async def verify_initial(self) -> None:
        """Checks that every server has loaded the trainer's initial weights. Raises WeightMismatch otherwise."""
        config = self.config
        async with self.trainer.queue:
            changes = config.model_dtype not in ("float32", config.engine_dtype)
            if self.adapters is not None or changes or config.inference_quantization != "none":
                # With an adapter, every request names it from the start, so that running requests take part in syncs.
                # Otherwise the engine may have more or fewer digits than the trainer, so it gets the trainer's weights.
                await self._probe(await self._send(self.trainer.version, self.engines_up(), fingerprints=True))
                return
            update = await self._make_update(self.trainer.version)
            report = SyncReport(update.version, time.time(), servers=[ServerSync(s) for s in self.engines_up()])
            for rank_report in await self.trainer.send_weights(update, [], fingerprints=True):
                report.fingerprints.update(rank_report.fingerprints)
            await self._probe(report, initial=update)

    async def sync(self) -> dict[str, float]:
        """Sends the weights to every available server. Returns step metrics. Raises `WeightMismatch`."""
        async with self.trainer.queue:
            every = self.config.weight_probe_every
            probe = self._num_syncs == 0 or (every > 0 and self._num_syncs % every == 0)
            report = await self._send(self.trainer.version, self.engines_up(), fingerprints=probe)
            self._num_syncs += 1
            if probe and report.updated_servers:
                await self._probe(report)
            return report.metrics()

    async def sync_one(self, server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        """Sends the trainer's weights to one server, between two training steps.

        `fresh` means that the server's process is new. An old process that has the newest weights receives nothing.
        Calls `on_loaded` before any other sync can start, so that the server misses none. Raises InfrastructureError if
        the server fails again.
        """
        if not fresh and self._loaded.get(server) == self.trainer.weights_identity:
            on_loaded()  # a training step may hold the queue for minutes
            return
        async with self.trainer.queue:
            if fresh:
                self._connected.pop(server, None)
                self._loaded.pop(server, None)
            if self._loaded.get(server) != self.trainer.weights_identity:
                report = await self._send(self.trainer.version, [server], fingerprints=True)
                if not report.updated_servers:
                    raise InfrastructureError(f"server {server} did not load the weights: {report.servers[0].failure}")
                await self._probe(report)
                if not report.updated_servers:
                    raise InfrastructureError(f"server {server} failed its verification: {report.servers[0].failure}")
            on_loaded()

    async def verify(self, *, corrupt: str | None = None) -> dict[int, ProbeReport]:
        """Syncs and verifies every available server. Returns the results.

        `corrupt` names a tensor that is sent with one bit changed, which the verification must detect. The engines then
        have wrong weights until the next sync. A server that fails meanwhile is reported and has no result.
        """
        async with self.trainer.queue:
            report = await self._send(self.trainer.version, self.engines_up(), fingerprints=True, corrupt=corrupt)
            self._num_syncs += 1
            return await self._examine(report)

    async def _send(
        self, version: int, servers: list[int], *, fingerprints: bool, corrupt: str | None = None
    ) -> SyncReport:
        report = SyncReport(version, time.time(), servers=[ServerSync(server, time.time()) for server in servers])
        if self.adapters is not None:
            return await self._send_adapter(report, self.adapters)
        if self._connected_ranks != self.trainer.num_replacements:
            self._connected_ranks = self.trainer.num_replacements
            self._connected.clear()
        update = replace(await self._make_update(version), verify=fingerprints)
        await self._each(report, self._connect)
        await self._each(report, self._begin)
        in_background = replace(update, background=True)

        async def receive(part: ServerSync) -> None:
            # In this order, a server's transfer never ends after it resumes.
            part.transfer_started_at, started = time.time(), time.monotonic()
            client = self.clients[part.server]
            work = client.begin_background(in_background) if part.background else client.update_weights(update)
            call = asyncio.ensure_future(work)
            try:
                await asyncio.wait([call, send], return_when=asyncio.FIRST_COMPLETED)
                if not call.done():  # a hanging server that the sender has given up would not respond
                    for rank_report in await send:
                        if (reason := rank_report.errors.get(part.server)) is not None:
                            raise InfrastructureError(reason)
                await call
            except InfrastructureError as error:
                await self.trainer.abort_engine(part.server, str(error))
                raise
            finally:
                call.cancel()
            part.transfer_seconds = time.monotonic() - started

        started = time.monotonic()
        send = asyncio.ensure_future(
            self.trainer.send_weights(update, report.updated_servers, fingerprints=fingerprints, corrupt=corrupt)
        )
        receiving = asyncio.ensure_future(self._each(report, receive))
        try:
            sent, _ = await asyncio.gather(send, receiving)
        finally:
            send.cancel()
            receiving.cancel()
        report.trainer_seconds = time.monotonic() - started
        report.num_bytes = update.num_bytes
        for rank_report in sent:
            report.fingerprints.update(rank_report.fingerprints)
            report.trainer_spans += rank_report.spans
            for part in report.servers:
                if part.background and part.server in rank_report.engine_seconds:
                    part.transfer_seconds = rank_report.engine_seconds[part.server]
            for engine, reason in rank_report.errors.items():
                self._fail(report, engine, InfrastructureError(reason))
        await self._each(report, lambda part: self._finish(part, in_background))
        report.ended_at = time.time()
        self.on_report(report)
        return report

    async def _send_adapter(self, report: SyncReport, adapters: Path) -> SyncReport:
        """Writes the trainer's adapter, loads it into the servers of `report`, and removes the previous adapter."""
        # New weights get a new path, because an engine's prefix cache may identify an adapter by its path.
        folder = adapters / "-".join(map(str, self.trainer.weights_identity))
        started = time.monotonic()
        report.num_bytes = await self.trainer.sync_adapter(folder, self.config.engine_dtype)
        report.trainer_seconds = time.monotonic() - started

        async def load(part: ServerSync) -> None:
            client = self.clients[part.server]
            await self._pause(part)
            await client.start_update()
            await client.finish_update(report.version)  # an engine may forget adapters here
            part.transfer_started_at, started = time.time(), time.monotonic()
            await client.load_adapter(folder)
            part.transfer_seconds = time.monotonic() - started
            await client.resume()
            part.resumed_at = time.time()
            self._loaded[part.server] = self.trainer.weights_identity

        await self._each(report, load)
        report.ended_at = time.time()
        self.on_report(report)
        await asyncio.to_thread(_remove_all_but, folder)
        return report

    async def _make_update(self, version: int) -> UpdateInfo:
        """Returns the description of a sync of all tensors."""
        config = self.config
        if self._metas is None:
            self._metas = await self.trainer.weight_metadata()
        return make_update(
            self._metas,
            version=version,
            dtype=config.engine_dtype,
            mode=config.weight_broadcast_mode,
            bucket_mb=config.weight_broadcast_bucket_mb,
            timeout_seconds=config.weight_sync_timeout_seconds,
        )

    async def _connect(self, part: ServerSync) -> None:
        """Opens the communicator of a server that has none. The trainer listens, and the server's workers connect."""
        if part.server in self._connected:
            return
        info = await self.trainer.listen_for_engine(part.server, self.config.inference_tensor_parallel_size)
        connecting = asyncio.ensure_future(self.trainer.connect_engine(part.server))
        try:
            await asyncio.gather(connecting, self.clients[part.server].init_weight_transfer(info))
        except InfrastructureError as error:
            if not connecting.done():  # otherwise it would wait for workers that do not connect
                await self.trainer.abort_engine(part.server, str(error))
            raise
        # Always called, because it also ends an update that failed in one worker and is still open in the others.
        in_place_because = await self.clients[part.server].transfer_mode()
        if in_place_because is not None:
            logger.info("server %d receives weights in place: %s", part.server, in_place_because)
        self._connected[part.server] = in_place_because is None and self.config.weight_transfer != "in_place"

    async def _begin(self, part: ServerSync) -> None:
        """Pauses the server and starts its update, if it receives weights in place."""
        part.background = self._connected[part.server]
        if not part.background:
            await self._pause(part)
            await self.clients[part.server].start_update()

    async def _pause(self, part: ServerSync) -> None:
        part.paused_at = time.time()
        await self.clients[part.server].pause(drop_caches=self.config.inflight_kv == "recompute")

    async def _finish(self, part: ServerSync, in_background: UpdateInfo) -> None:
        """Ends the update. An overlapped update pauses the server here, for the swap only."""
        client = self.clients[part.server]
        if part.background:
            await client.start_update()
            await client.update_weights(in_background)  # checks that all tensors have arrived, without changing weights
            await self._pause(part)
        await client.finish_update(in_background.version)
        await client.resume()
        part.resumed_at = time.time()
        self._loaded[part.server] = self.trainer.weights_identity

    async def _each(self, report: SyncReport, action: Callable[[ServerSync], Any]) -> None:
        """Runs `action` for every server that has not failed. A failure drops only that server."""

        async def one(part: ServerSync) -> None:
            try:
                await action(part)
            except (InfrastructureError, DeadlineExceeded) as error:
                self._fail(report, part.server, InfrastructureError(str(error)))

        await asyncio.gather(*(one(part) for part in report.servers if part.failure is None))

    def _fail(self, report: SyncReport, server: int, error: InfrastructureError) -> None:
        for part in report.servers:
            if part.server == server and part.failure is None:
                part.failure = str(error)
                self._connected.pop(server, None)
                self._loaded.pop(server, None)
                self.on_failure(server, error)

    # Verification

    async def _probe(self, report: SyncReport, *, initial: UpdateInfo | None = None) -> None:
        """Raises WeightMismatch unless servers have the sent weights or, with `initial`, the trainer's weights."""
        for server, probe in (await self._examine(report, initial=initial)).items():
            if not probe.ok and probe.is_loaded and initial is None:
                raise WeightMismatch(
                    f"server {server} has the weights of version {report.version}, but computes other logprobs with "
                    f"them than the trainer: {probe}. If learning_rate is far too high, the weights have become too "
                    "large for equal results: lower it. Otherwise run `telescope verify`"
                )
            if not probe.ok:
                raise WeightMismatch(
                    f"server {server} has not loaded the weights of version {report.version} that the trainer "
                    f"{'sent' if initial is None else 'starts from'}: {probe}"
                )
            logger.info("weights of version %d verified on server %d: %s", report.version, server, probe)

    async def _examine(self, report: SyncReport, *, initial: UpdateInfo | None = None) -> dict[int, ProbeReport]:
        """Compares loaded with sent weights, and the logprobs of a fixed text."""
        trainer_logprobs = await self.trainer.sequence_logprobs(self.probe_token_ids)
        probes: dict[int, ProbeReport] = {}
        for server in report.updated_servers:
            client = self.clients[server]
            try:
                loaded = await client.fingerprints(initial) if self.adapters is None else None
                engine_logprobs = await client.prompt_logprobs(self.probe_token_ids)
            except InfrastructureError as error:
                # Unverified counts as failed: the server gets the weights again and is verified before it serves.
                self._fail(report, server, error)
                continue
            # In a thread, because it takes 0.1 s for a model with tens of thousands of expert tensors.
            probes[server] = self.last_probe[server] = await asyncio.to_thread(
                compare,
                sent=report.fingerprints,
                loaded=loaded,
                trainer_logprobs=trainer_logprobs,
                engine_logprobs=engine_logprobs,
                precisions=self.config.precisions,
            )
        return probes


def _remove_all_but(folder: Path) -> None:
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)  # on NFS, a file that a server has open keeps its folder
