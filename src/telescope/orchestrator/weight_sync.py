"""Bringing the trainer's weights into the running engines, and proving that they arrived.

For one sync, per server, while the trainer's ranks gather and send, one communicator per engine:
    in place:       pause (running requests freeze) -> start update -> receive -> finish (version counted) -> resume
    in background:  begin to receive (requests run on) ... all there -> start update -> pause -> finish (swap) -> resume
Which of the two, the server's workers say when they are connected. Owns that order, the connections, and the
measurements; what is sent is `weights`, which servers are up is `servers`.

Invariants: syncs hold the trainer's queue, so they run one at a time and never beside a training step; a server that
fails at any point is left out of the rest of the sync, its communicator is given up, and nobody else waits for it; an
engine that was paused is resumed or taken out; a trainer that fails ends the sync at once, whatever servers wait for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from telescope.cluster.trainer_group import TrainerGroup
from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded, InfrastructureError
from telescope.inference.client import EngineClient
from telescope.trainer.batch import Span
from telescope.weights.plan import TensorMeta, make_update
from telescope.weights.probe import ProbeReport, compare

logger = logging.getLogger(__name__)


@dataclass
class ServerSync:
    """One server's part of a sync. Seconds of wall time; `failure` is None when it holds the new weights."""

    server: int
    started_at: float = 0.0
    paused_at: float = 0.0
    resumed_at: float = 0.0
    transfer_started_at: float = 0.0
    transfer_seconds: float = 0.0
    background: bool = False
    """Whether it received beside its work, so that the pause was for the swap alone."""
    failure: str | None = None

    @property
    def pause_seconds(self) -> float:
        return max(self.resumed_at - self.paused_at, 0.0)


@dataclass
class SyncReport:
    """One sync. `trainer_seconds` is how long the trainer's ranks were busy with it."""

    version: int
    started_at: float
    ended_at: float = 0.0
    trainer_seconds: float = 0.0
    num_bytes: int = 0
    servers: list[ServerSync] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    trainer_spans: list[Span] = field(default_factory=list)
    """What each of the trainer's ranks did when."""

    @property
    def held_by(self) -> list[int]:
        """Servers that hold the new weights."""
        return [server.server for server in self.servers if server.failure is None]

    def metrics(self) -> dict[str, float]:
        """Step metrics of this sync: slowest server and mean over servers."""
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


class WeightMismatch(RuntimeError):
    """The probe found an engine that does not hold what the trainer sent. The message names the tensors."""


class WeightSync:
    """Sends weights of the trainer group to engine clients."""

    def __init__(
        self,
        config: TelescopeConfig,
        trainer: TrainerGroup,
        clients: Sequence[EngineClient],
        *,
        loopback: bool,
        engines_up: Callable[[], list[int]],
        on_failure: Callable[[int, InfrastructureError], None],
        on_report: Callable[[SyncReport], None],
        probe_token_ids: list[int],
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._clients = clients
        self._loopback = loopback
        self._engines_up = engines_up
        self._on_failure = on_failure
        self._on_report = on_report
        self._probe_token_ids = probe_token_ids
        self._connected: set[int] = set()
        self._in_background: set[int] = set()
        # Every server has loaded the weights that the trainer starts from by itself.
        self._held: dict[int, tuple[int, int]] = dict.fromkeys(range(len(clients)), trainer.weights_identity)
        """`weights_identity` of what each server holds, as far as it is known."""
        self._metas: list[TensorMeta] | None = None
        self._num_syncs = 0
        self.last_probe: dict[int, ProbeReport] = {}

    async def sync(self) -> dict[str, float]:
        """Bring the trainer's weights into every server that is up. Returns step metrics.

        Raises WeightMismatch when the probe of this sync fails.
        """
        async with self._trainer.queue:
            probe = self._probe_is_due()
            report = await self._send(self._trainer.version, self._engines_up(), fingerprints=probe)
            self._num_syncs += 1
            if probe and report.held_by:
                await self._probe(report)
            return report.metrics()

    async def sync_one(self, server: int, on_held: Callable[[], None], *, fresh: bool) -> None:
        """Bring the trainer's weights into one server that was out, between two training steps.

        `fresh` says that its process is a new one; an old one that still holds the newest weights is sent nothing.
        `on_held` is called before any other sync can begin, so that none passes the server by. Raises
        InfrastructureError when the server fails again.
        """
        async with self._trainer.queue:
            if fresh:
                self._connected.discard(server)
                self._held.pop(server, None)
            if self._held.get(server) != self._trainer.weights_identity:
                report = await self._send(self._trainer.version, [server], fingerprints=True)
                if not report.held_by:
                    raise InfrastructureError(f"server {server} did not take the weights: {report.servers[0].failure}")
                await self._probe(report)
                if not report.held_by:
                    raise InfrastructureError(f"server {server} failed its probe: {report.servers[0].failure}")
            on_held()

    async def prove(self, *, spoil: str | None = None) -> dict[int, ProbeReport]:
        """Sync and probe every server that is up, whatever the config says, and return the verdicts instead of raising.

        `spoil` names a tensor that is sent with one bit changed, which the probe must notice. The engines then hold
        wrong weights until the next sync. A server that fails on the way is reported as ever and has no verdict.
        """
        async with self._trainer.queue:
            report = await self._send(self._trainer.version, self._engines_up(), fingerprints=True, spoil=spoil)
            self._num_syncs += 1
            return await self._examine(report)

    async def _send(
        self, version: int, servers: list[int], *, fingerprints: bool, spoil: str | None = None
    ) -> SyncReport:
        config = self._config
        report = SyncReport(version, time.time(), servers=[ServerSync(server, time.time()) for server in servers])
        if self._metas is None:
            self._metas = await self._trainer.weight_metadata()
        await self._each(report, self._connect)
        await self._each(report, self._begin)
        update = make_update(
            self._metas,
            version=version,
            dtype=config.engine_dtype,
            mode=config.weight_broadcast_mode,
            bucket_mb=config.weight_broadcast_bucket_mb,
            timeout_seconds=config.weight_sync_timeout_seconds,
        )
        body, in_background = update.to_dict(), replace(update, background=True).to_dict()

        async def receive(part: ServerSync) -> None:
            started, part.transfer_started_at = time.monotonic(), time.time()
            client = self._clients[part.server]
            try:
                if part.background:
                    await client.call_worker("telescope_begin_background", [json.dumps(in_background)])
                else:
                    await client.update_weights(body)
            except InfrastructureError as error:
                await self._trainer.abort_engine(part.server, str(error))
                raise
            part.transfer_seconds = time.monotonic() - started

        started = time.monotonic()
        send = asyncio.ensure_future(
            self._trainer.send_weights(update, report.held_by, fingerprints=fingerprints, spoil=spoil)
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
        self._on_report(report)
        return report

    async def _connect(self, part: ServerSync) -> None:
        """Open the communicator of a server that has none: the sender listens, the workers join."""
        if part.server in self._connected:
            return
        info = await self._trainer.listen_for_engine(
            part.server, self._config.inference_tensor_parallel_size, loopback=self._loopback
        )
        connecting = asyncio.ensure_future(self._trainer.connect_engine(part.server))
        try:
            await asyncio.gather(connecting, self._clients[part.server].init_weight_transfer(info.to_dict()))
        except InfrastructureError as error:
            if not connecting.done():  # it would wait for workers that will not come
                await self._trainer.abort_engine(part.server, str(error))
            raise
        self._in_background.discard(part.server)
        # Asked in any case: the workers also end what an update that failed in one of them left open in the others.
        modes = await self._clients[part.server].call_worker("telescope_transfer_mode")
        if self._config.weight_transfer != "in_place":
            if modes and all(mode.get("background") for mode in modes):
                self._in_background.add(part.server)
            else:
                reasons = "; ".join(dict.fromkeys(mode.get("reason") or "it does not say why" for mode in modes))
                logger.info("server %d takes its weights in place: %s", part.server, reasons)
        self._connected.add(part.server)

    async def _begin(self, part: ServerSync) -> None:
        """In place: freeze the server and open its layers. In the background there is nothing to do yet."""
        part.background = part.server in self._in_background
        if not part.background:
            await self._pause(part)
            await self._clients[part.server].start_update()

    async def _pause(self, part: ServerSync) -> None:
        part.paused_at = time.time()
        await self._clients[part.server].pause("keep", drop_caches=self._config.inflight_kv == "recompute")

    async def _finish(self, part: ServerSync, in_background: dict[str, Any]) -> None:
        """End the update, in the pause that was for all of it, or in one for the swap alone."""
        client = self._clients[part.server]
        if part.background:
            await client.start_update()
            await client.update_weights(in_background)  # that everything is there; changes nothing yet
            await self._pause(part)
        await client.finish_update(in_background["version"])
        await client.resume()
        part.resumed_at = time.time()
        self._held[part.server] = self._trainer.weights_identity

    async def _each(self, report: SyncReport, action: Callable[[ServerSync], Any]) -> None:
        """Run `action` for every server that has not failed; a failure takes that server out and nobody else."""

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
                self._connected.discard(server)
                self._held.pop(server, None)
                self._on_failure(server, error)

    # The proof of weights

    def _probe_is_due(self) -> bool:
        every = self._config.weight_probe_every
        return self._num_syncs == 0 or (every > 0 and self._num_syncs % every == 0)

    async def _probe(self, report: SyncReport) -> None:
        """Raise WeightMismatch unless every server of the sync holds what was sent to it."""
        for server, probe in (await self._examine(report)).items():
            if not probe.ok:
                raise WeightMismatch(
                    f"server {server} does not hold the weights of version {report.version} that the trainer sent: "
                    f"{probe}"
                )
            logger.info("weights of version %d proven on server %d: %s", report.version, server, probe)

    async def _examine(self, report: SyncReport) -> dict[int, ProbeReport]:
        """Compare what each server holds with what was sent, and the logprobs of a fixed text on both sides."""
        trainer_logprobs = await self._trainer.sequence_logprobs(self._probe_token_ids)
        probes: dict[int, ProbeReport] = {}
        for server in report.held_by:
            client = self._clients[server]
            try:
                held = await client.call_worker("telescope_fingerprints")
                engine_logprobs = await client.prompt_logprobs(self._probe_token_ids)
            except InfrastructureError as error:
                # Unproven is as good as failed: it is given the weights again, and asked again, before it serves.
                self._fail(report, server, error)
                continue
            # In a thread: a tenth of a second for a model whose experts make tens of thousands of tensors.
            probes[server] = self.last_probe[server] = await asyncio.to_thread(
                compare,
                sent=report.fingerprints,
                held=held,
                trainer_logprobs=trainer_logprobs,
                engine_logprobs=engine_logprobs,
                dtype=self._config.engine_dtype,
            )
        return probes
