"""Starts and wires the components of a run, with a trainer or without one (`telescope eval`).

Ray starts first, then the rollout workers, because the environments' data must be valid before anything expensive
starts, then trainer and engines side by side. Each component registers its stop on the exit stack, so that they stop in
reverse order in any case. `session` surrounds the components.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from telescope.cluster.inference_group import ActorHandle, InferenceGroup
from telescope.cluster.placement import network_of, own_host, reserve
from telescope.cluster.ray_cluster import Cluster, abandon, connect, disconnect, keep_logs
from telescope.cluster.rollout_group import NEWS_SECONDS, RolloutGroup
from telescope.cluster.trainer_group import TrainerGroup
from telescope.config import TelescopeConfig
from telescope.config.machine import local_resources
from telescope.config.plan import plan_placement
from telescope.environments.types import EnvironmentInfo
from telescope.environments.user_code import gather_or_cancel
from telescope.errors import UserError
from telescope.evals.entries import EnvironmentKeys, environment_keys
from telescope.evals.runner import PlannedEval, plan_evals
from telescope.inference.base import EngineBackend, backend_of
from telescope.inference.request_tracing import receive_traces
from telescope.orchestrator.filters import check_reward_ranges
from telescope.orchestrator.prompt_buffer import measure_prompts
from telescope.orchestrator.record_rows import trainer_span_row
from telescope.orchestrator.resume import describe_data
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import Interrupted, RunStatus
from telescope.orchestrator.weight_sync import SyncReport, WeightSync
from telescope.record.files import RunFiles
from telescope.record.recorder import REPORTED
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import RolloutPool
from telescope.rollout.request_slots import slots_per_server
from telescope.rollout.sample import RolloutSettings
from telescope.rollout.stops import Stops
from telescope.rollout.trial import notices_of
from telescope.sandbox.base import provider_arguments
from telescope.sandbox.ledger import reap
from telescope.utils.process import start_daemon_thread
from telescope.weights.probe import probe_text

logger = logging.getLogger(__name__)

NOT_STARTED: Any = None


@dataclass
class RunComponents:
    """The components of a run. Without a trainer, `trainer` and `weights` are None."""

    config: TelescopeConfig
    keys: EnvironmentKeys
    rollouts: RolloutPool
    settings: RolloutSettings
    evals: list[PlannedEval]
    data: dict[str, Any]
    """Sizes of the datasets and held-out items (`resume.describe_data`)."""
    trainer: TrainerGroup = NOT_STARTED
    inference: InferenceGroup = NOT_STARTED
    servers: ServerPool = NOT_STARTED
    weights: WeightSync = NOT_STARTED
    cluster: Cluster = NOT_STARTED
    first_version: int = 0
    """Policy version of the weights that the servers start with."""
    topology: dict[str, str] = field(default_factory=dict)
    """The node and the device of each process."""

    @classmethod
    async def plan(cls, config: TelescopeConfig, keys: EnvironmentKeys, rollouts: RolloutPool) -> RunComponents:
        """Returns the components once the rollout workers are started. Plans the evals; servers are still missing."""
        infos = rollouts.infos
        settings = RolloutSettings.from_config(config, Stops(**next(iter(infos.values())).stops))
        evals = await plan_evals(config, keys, rollouts, settings.sampling)
        data = describe_data(keys.training, [infos[key] for key in keys.training], evals)
        return cls(config, keys, rollouts, settings, evals, data)

    def open_servers(self, handles: Sequence[ActorHandle], clients: Sequence[EngineBackend], status: RunStatus) -> None:
        """Opens the request slots of started servers. Set `servers.bring_weights` next."""
        config = self.config
        group_size = config.group_size if config.enable_individual_sample_lanes else 1
        self.servers = ServerPool(
            handles,
            clients,
            self.rollouts.open_lane(
                TRAINING,
                [slots_per_server(config)] * len(clients),
                group_size,
                servers=range(len(clients) - config.num_eval_servers),
                keys=zip(self.keys.training, (entry.weight for entry in config.environments), strict=False),
            ),
            status,
            start_timeout=config.inference_start_timeout_seconds,
            hang_timeout=max(backend_of(config).hang_timeout(config), config.weight_sync_timeout_seconds),
            num_dedicated=config.num_eval_servers,
            eval_slots_per_server=config.lanes_per_server,
        )
        self.rollouts.on_engine_failure = self.servers.close
        self.rollouts.on_progress = status.progressed
        for index in range(len(clients)):
            self.servers.open(index)

    async def dump_stacks(self) -> dict[str, str]:
        """Returns stacks of trainer ranks and inference servers. Rollout workers write theirs to their logs."""
        groups = [group for group in (self.trainer, self.inference) if group is not None]
        return {process: text for group in groups for process, text in (await group.dump_stacks()).items()}


async def start_components(
    config: TelescopeConfig,
    directory: RunDirectory,
    status: RunStatus,
    stack: AsyncExitStack,
    temporary: Path,
    *,
    with_trainer: bool = True,
    on_ray_started: Callable[[], None] = lambda: None,
    on_data: Callable[[RunComponents], Awaitable[TelescopeConfig | None]] | None = None,
) -> RunComponents:
    """Starts all components that `config` requires. `stack` stops them.

    `temporary` is the run's private directory (`Reaper.directory`). `on_ray_started` is called once Ray has installed
    its signal handlers. `on_data` is called when only the rollout workers are started; it returns the config of trainer
    and servers, or None to start none. Raises UserError for problems that a user can fix, otherwise the first error of
    a component.
    """
    status.phase = "starting Ray"
    cluster = await _connect(config, directory, stack, temporary)
    on_ray_started()

    status.phase = "loading environments"
    keys = environment_keys(config, with_training=with_trainer)
    providers = provider_arguments(spec.kwargs for spec in keys.specs)
    await _reap_sandboxes(directory, providers)  # sandboxes of an attempt that was killed
    stack.push_async_callback(_reap_sandboxes, directory, providers)
    group = RolloutGroup(config, keys.specs, directory.path, cluster, directory.recorder.write)
    stack.push_async_callback(group.stop)
    await group.start()
    infos = {spec.identity: info for spec, info in zip(keys.specs, group.infos, strict=True)}
    rollouts = RolloutPool(
        group.handles, infos=infos, homes=group.homes, seconds=NEWS_SECONDS, interval=group.report_interval
    )
    stack.push_async_callback(rollouts.close)
    if config.eager_prepare_resources:
        await group.prepare_resources()
    report_environments(config, keys, infos, status)
    components = await RunComponents.plan(config, keys, rollouts)
    places = Counter(cluster.node_names.get(handle.node, handle.node) for handle in group.handles)
    components.cluster = cluster
    components.topology = {
        "driver": cluster.node_names[cluster.driver_node],
        "rollout workers": ", ".join(f"{number} on {node}" for node, number in places.items()),
    }
    if on_data is not None:
        if (chosen := await on_data(components)) is None:
            components.open_servers([], [], status)
            return components
        config = components.config = chosen
    if with_trainer:
        for news in await measure_prompts(config, rollouts, keys.training, components.settings.sampling.max_context):
            status.report(news, "environment", "warning", log=logger)

    placement = await reserve(config, plan_placement(config, cluster.resources, with_trainer=with_trainer))
    stack.callback(placement.remove)
    network = network_of(config, placement, cluster.driver_node)
    status.phase = f"starting {'the trainer and ' if with_trainer else ''}the inference servers"
    if with_trainer:
        loopback = network.broadcast_on_loopback
        components.trainer = TrainerGroup(config, placement, directory.path, cluster, loopback=loopback)
        stack.push_async_callback(components.trainer.stop)
    traces = None
    if config.enable_vllm_tracing:
        host, write = own_host(loopback=network.servers_on_loopback), partial(directory.recorder.write, "spans")
        traces = stack.enter_context(receive_traces(config, host, write))
    components.inference = inference = InferenceGroup(
        config, placement, directory.path, cluster, network, secrets.token_urlsafe(32), traces=traces
    )
    stack.push_async_callback(inference.stop)
    await start_workers(components, directory, status)

    for client in inference.clients:
        client.initial_version = client.loaded_version = components.first_version
    await group.connect(
        inference.addresses, lambda: [client.loaded_version for client in inference.clients], components.first_version
    )
    stack.push_async_callback(rollouts.close)  # before the servers, so that their end is no failure
    components.open_servers(inference.handles, inference.clients, status)
    for index, node in enumerate(placement.server_nodes):
        count = placement.gpus_per_server
        gpus = f"{count:g} GPU{'s' * (count > 1)}" if count else "CPU"
        components.topology[f"inference server {index}"] = f"{cluster.node_names[node]}, {gpus}"
    if with_trainer:
        probe_prompt = await rollouts.prepare(keys.training[0], 0)
        components.weights = WeightSync(
            config,
            components.trainer,
            inference.clients,
            engines_up=lambda: components.servers.synced,
            on_failure=components.servers.close,
            on_report=lambda report: record_sync(directory, report),
            adapters=RunFiles(directory.path).adapters if config.lora_sync == "adapter" else None,
            probe_token_ids=probe_text(probe_prompt.token_ids, config.max_model_len),
        )
        components.servers.bring_weights = components.weights.sync_one
    return components


def report_environments(
    config: TelescopeConfig, keys: EnvironmentKeys, by_key: Mapping[str, EnvironmentInfo], status: RunStatus
) -> None:
    """Checks the loaded environments, and reports their notices and how a completion ends.

    Notices go to the log, and to `status` unless it has them. Raises UserError for a reward range that the config
    cannot use.
    """
    ends = Stops(**next(iter(by_key.values())).stops).description or "only its length: set stop_token_ids or stop"
    status.report(f"What ends an answer: {ends}", "environment", log=logger)
    check_reward_ranges(config, [by_key[key] for key in keys.training])
    for notice in notices_of([by_key[key] for key in (*keys.training, *keys.evals)]):
        if notice in status.messages:  # usually shown before the start
            logger.warning("%s", notice, extra=REPORTED)
        else:
            status.report(notice, "environment", "warning", log=logger)


async def _reap_sandboxes(directory: RunDirectory, providers: Mapping[str, Mapping[str, Any]]) -> None:
    """Destroys sandboxes that workers have left behind."""
    if left := await reap(directory.path, providers):
        logger.warning("Destroyed %d sandboxes that were left: %s", len(left), ", ".join(left[:10]))


async def _connect(config: TelescopeConfig, directory: RunDirectory, stack: AsyncExitStack, temporary: Path) -> Cluster:
    """Joins or starts Ray until `stack` ends. A cancellation does not wait for the start (up to a minute)."""
    stopped = threading.Event()

    def start() -> Cluster:
        machine = local_resources()
        return connect(
            config, directory.path, temporary, local_cpus=machine.cpus, local_gpus=machine.gpus, stopped=stopped
        )

    try:
        cluster = await asyncio.wrap_future(start_daemon_thread(start, "telescope-cluster", stays=True))
    except asyncio.CancelledError:
        stopped.set()
        abandon()  # the reaper ends it
        raise

    def leave(_: object, error: BaseException | None, *__: object) -> None:
        """Leaves Ray. After an error, keeps its logs in the run directory."""
        if cluster.started_here and isinstance(error, Exception) and not isinstance(error, Interrupted | UserError):
            keep_logs(temporary, directory.path)
        disconnect(cluster, config)

    stack.push(leave)
    return cluster


async def start_workers(components: RunComponents, directory: RunDirectory, status: RunStatus) -> None:
    """Loads the trainer and starts the servers, concurrently unless they share GPUs. Raises the first failure."""
    servers = [_start_server(components, index, status) for index in range(components.config.num_inference_servers)]
    if components.config.share_gpus:
        # A server measures free memory, so it would count a trainer that loads meanwhile.
        await gather_or_cancel(servers)
        servers = []
    await gather_or_cancel([*servers, *([load_trainer(components, directory, status)] if components.trainer else [])])


async def load_trainer(components: RunComponents, directory: RunDirectory, status: RunStatus) -> None:
    """Loads the model into the started ranks and compiles it."""
    trainer = components.trainer
    status.components["trainer"] = "loading the model"
    infos = await trainer.setup()
    for info in infos:
        _check_hash(components.trainer.config, "a trainer rank", info.config_hash)
    if infos[0].compiles:
        status.components["trainer"] = "compiling the model's blocks"
        spans = await trainer.warm_up()
        seconds = max(span.end for span in spans) - min(span.start for span in spans)
        logger.info("The trainer has compiled the model's blocks, which took %.1f s", seconds)
        for span in spans:
            directory.recorder.write("spans", trainer_span_row(span, None))
    status.components["trainer"] = "ready"


async def _start_server(components: RunComponents, index: int, status: RunStatus) -> None:
    """Starts a server and shows its stages in the live view, because a large model loads for minutes."""
    progress = asyncio.create_task(_show_start(components, index, status))
    try:
        info = await components.inference.start(index)
    finally:
        progress.cancel()
    _check_hash(components.config, f"inference server {index}", info.config_hash)
    status.components[f"server {index}"] = "ready"


async def _show_start(components: RunComponents, index: int, status: RunStatus) -> None:
    backend, started_at = backend_of(components.config), time.monotonic()
    status.components[f"server {index}"] = f"starting {backend.name}"
    stage = backend.progress([])
    while True:
        await asyncio.sleep(1.0)
        stage = backend.progress((await components.inference.handles[index].status()).last_log_lines, stage)
        seconds = time.monotonic() - started_at
        status.components[f"server {index}"] = f"starting {backend.name}: {stage} ({seconds:.0f} s)"


def _check_hash(config: TelescopeConfig, process: str, config_hash: str) -> None:
    if config_hash != config.hash:
        raise RuntimeError(
            f"{process} runs with config {config_hash}, the driver with {config.hash}: "
            "the processes do not run the same version of Telescope"
        )


def record_sync(directory: RunDirectory, report: SyncReport) -> None:
    """Records the spans of a weight sync: a pause and a transfer per server, and the spans of the trainer's ranks."""
    step, write = report.version - 1, partial(directory.recorder.write, "spans")
    for sync in report.servers:
        shared = {"component": "weights", "server": sync.server, "step": step}
        attributes = {
            "version": str(report.version),
            "pause_seconds": f"{sync.pause_seconds:.6f}",
            "transfer_seconds": f"{sync.transfer_seconds:.6f}",
            "bytes": str(report.num_bytes),
            "background": str(sync.background).lower(),
            "failure": sync.failure or "",
        }
        start, end = sync.paused_at or sync.started_at, sync.resumed_at or report.ended_at
        write({**shared, "name": "weight_sync", "start": start, "end": end, "attributes": attributes})
        if sync.transfer_seconds:
            start, end = sync.transfer_started_at, sync.transfer_started_at + sync.transfer_seconds
            write({**shared, "name": "weight_transfer", "start": start, "end": end})
    for span in report.trainer_spans:
        write(trainer_span_row(span, step))
