"""A training run from the resolved config to the summary: starts the parts, wires them, and takes them down again.

This is the composition root: the only place that knows every room. Order of starting: run directory and record,
environments (their data must be sound before anything expensive starts), Ray, then trainer and engines side by side.
Everything is ended in the reverse order, whatever happened, each step with a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from telescope.cluster.inference_group import InferenceGroup
from telescope.cluster.placement import reserve
from telescope.cluster.ray_cluster import Cluster, connect, disconnect
from telescope.cluster.trainer_group import TrainerGroup
from telescope.config import TelescopeConfig
from telescope.config.machine import local_resources
from telescope.config.plan import plan_placement
from telescope.environments.pool import EnvironmentPool
from telescope.environments.records import RendererSpec
from telescope.errors import UserError
from telescope.orchestrator.draws import DrawSequence
from telescope.orchestrator.evaluation import EnvironmentKeys, Evaluation, environment_keys, plan_evals
from telescope.orchestrator.interrupt import Interrupt
from telescope.orchestrator.lanes import LanePool, make_lanes
from telescope.orchestrator.orchestrator import Orchestrator, Services
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.summary import Interrupted, RunSummary, summarise
from telescope.orchestrator.supervise import Supervisor, watchdog
from telescope.orchestrator.weight_sync import SyncReport, WeightSync
from telescope.rollout.sample import RolloutSettings

logger = logging.getLogger(__name__)

PROBE_TEXT_TOKENS = 64
"""Length of the fixed text whose logprobs are compared on both sides of a weight sync."""


class View(Protocol):
    """Something that shows a run to a person while it goes on."""

    def start(self, status: RunStatus) -> None: ...

    def stop(self) -> None: ...


@dataclass
class _Parts:
    """The started parts of a run."""

    environments: EnvironmentPool
    keys: EnvironmentKeys
    cluster: Cluster
    trainer: TrainerGroup
    inference: InferenceGroup
    lanes: LanePool
    servers: ServerPool
    weights: WeightSync
    evaluation: Evaluation
    settings: RolloutSettings


def run_training(config: TelescopeConfig, notes: list[str], view: View | None = None) -> RunSummary:
    """Train as configured and return the summary, which also lies in the run directory.

    Raises UserError for input that cannot be run (nothing is left behind), the first error of any part otherwise.
    """
    return asyncio.run(_TrainingRun(config, notes, view).run())


class _TrainingRun:
    def __init__(self, config: TelescopeConfig, notes: list[str], view: View | None) -> None:
        self._config = config
        self._view = view
        self._directory = RunDirectory.create(config, notes)
        self._status = RunStatus(config.wandb_run_name, config.number_of_steps)
        self._status.messages.extend(notes)
        self._interrupt = Interrupt(self._status)
        self._started_at = time.time()
        self._training_seconds: float | None = None

    async def run(self) -> RunSummary:
        error: BaseException | None = None
        evaluation: Evaluation | None = None
        async with AsyncExitStack() as stack:
            stack.enter_context(self._directory.open_record(console=self._view is None))
            stack.callback(self._finish_view)
            if self._view is not None:
                self._view.start(self._status)
            self._interrupt.install(asyncio.get_running_loop())
            try:
                async with AsyncExitStack() as parts_stack:
                    parts_stack.callback(self._set_phase, "shutting down")
                    parts = await self._interrupt.run_until_first(self._start(parts_stack))
                    evaluation = parts.evaluation
                    await self._train(parts)
            except BaseException as caught:
                error = caught
            summary = summarise(
                self._config, self._directory.path, self._status,
                evaluation.results if evaluation is not None else [],
                seconds=time.time() - self._started_at, training_seconds=self._training_seconds,
                error=error, interrupted=self._interrupt.requested,
            )  # fmt: skip
            self._directory.ended(summary)
            self._status.phase = summary.sentence
        if error is not None and not isinstance(error, Interrupted):
            raise error
        return summary

    def _set_phase(self, phase: str) -> None:
        self._status.phase = phase

    def _finish_view(self) -> None:
        if self._view is not None:
            self._view.stop()

    # Starting

    async def _start(self, stack: AsyncExitStack) -> _Parts:
        config, status = self._config, self._status
        status.phase = "loading environments"
        keys = environment_keys(config)
        environments = await self._start_environments(stack, keys)
        settings = RolloutSettings.from_config(config)
        evals = await plan_evals(config, keys, environments, settings)

        status.phase = "starting Ray"
        cluster = await asyncio.to_thread(self._connect)
        stack.callback(disconnect, cluster, config)
        self._interrupt.install(asyncio.get_running_loop())  # ray.init installs handlers of its own
        plan = plan_placement(config, cluster.resources)
        placement = await reserve(config, on_gpu=plan.device == "cuda")
        stack.callback(placement.remove)

        status.phase = "starting the trainer and the inference servers"
        loopback = cluster.is_single_node and config.ray_broadcast_prefer_loopback_if_single_node
        trainer = TrainerGroup(config, placement, self._directory.path)
        stack.push_async_callback(trainer.stop)
        inference = InferenceGroup(config, placement, self._directory.path, cluster, secrets.token_urlsafe(32))
        stack.push_async_callback(inference.stop)
        lanes = make_lanes(
            individual=config.enable_individual_sample_lanes,
            num_servers=config.num_inference_servers,
            groups_per_server=config.max_concurrent_prompts_per_server,
            group_size=config.group_size,
        )
        await self._start_workers(trainer, inference, loopback)
        stack.push_async_callback(inference.close_clients)

        servers = ServerPool(
            inference.handles, inference.clients, lanes, status,
            start_timeout=config.inference_start_timeout_seconds,
            bring_weights=lambda server, on_held: weights.sync_one(server, on_held),
        )  # fmt: skip
        probe_prompt = await environments.prepare(keys.training[0], 0)
        weights = WeightSync(
            config, trainer, inference.clients, loopback=loopback,
            engines_up=lambda: servers.up,
            on_failure=servers.report_failure,
            on_report=self._record_sync,
            probe_token_ids=probe_prompt.token_ids[:PROBE_TEXT_TOKENS],
        )  # fmt: skip
        for index in range(config.num_inference_servers):
            servers.open(index)
        evaluation = Evaluation(evals, config, environments, lanes, self._directory.recorder, status)
        return _Parts(
            environments, keys, cluster, trainer, inference, lanes, servers, weights, evaluation, settings
        )  # fmt: skip

    async def _start_environments(self, stack: AsyncExitStack, keys: EnvironmentKeys) -> EnvironmentPool:
        config = self._config
        environments = EnvironmentPool(
            keys.specs,
            renderer=RendererSpec(
                tokenizer_path=config.model,
                chat_template=config.chat_template,
                enable_thinking=config.enable_thinking,
                trust_remote_code=config.trust_remote_code,
            ),
            num_workers=config.environment_workers or default_environment_workers(),
            timeout_seconds=config.environment_timeout_seconds,
            environments_path=list(config.environments_path),
            log_dir=self._directory.path / "logs",
        )
        stack.push_async_callback(environments.close)
        await environments.start()
        for spec in keys.specs:
            info = await environments.describe(spec.identity)
            if info.num_samples == 0:
                raise UserError(
                    f"environment {spec.name!r} has an empty dataset (kwargs {spec.kwargs}): name another dataset or split "
                    "in its kwargs, or widen its filters"
                )
            if info.is_multi_turn:
                raise UserError(
                    f"environment {spec.name!r} is multi-turn, which this version cannot run yet; choose a single-turn one"
                )
        return environments

    def _connect(self) -> Cluster:
        machine = local_resources()
        return connect(self._config, self._directory.path, local_cpus=machine.cpus, local_gpus=machine.gpus)

    async def _start_workers(self, trainer: TrainerGroup, inference: InferenceGroup, loopback: bool) -> None:
        """Load the trainer and start the servers side by side; the first failure is raised at once."""
        status = self._status

        async def start_trainer() -> None:
            status.set_part("trainer", "loading the model")
            for info in await trainer.setup(loopback=loopback):
                self._check_hash("a trainer rank", info.config_hash)
            status.set_part("trainer", "ready")

        async def start_server(index: int) -> None:
            status.set_part(f"server {index}", "starting vLLM")
            progress = asyncio.create_task(self._show_start(inference, index))
            try:
                info = await inference.start(index)
            finally:
                progress.cancel()
            self._check_hash(f"inference server {index}", info.config_hash)
            status.set_part(f"server {index}", "ready")

        tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (start_trainer(), *(start_server(i) for i in range(self._config.num_inference_servers)))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _show_start(self, inference: InferenceGroup, index: int) -> None:
        """The newest log line of a starting server, for the live view: loading takes minutes for a large model."""
        while True:
            await asyncio.sleep(1.0)
            lines = (await inference.handles[index].status()).last_log_lines
            if lines:
                self._status.set_part(f"server {index}", f"starting vLLM: {lines[-1].strip()[-90:]}")

    def _check_hash(self, process: str, config_hash: str) -> None:
        if config_hash != self._config.hash:
            raise RuntimeError(
                f"{process} runs with config {config_hash}, the driver with {self._config.hash}: "
                "the processes do not run the same version of Telescope"
            )

    # Training

    async def _train(self, parts: _Parts) -> None:
        config, status = self._config, self._status
        supervisor = Supervisor()
        supervisor.spawn(parts.servers.watch(), "server watch")
        supervisor.spawn(self._refresh_status(parts), "status")
        supervisor.spawn(watchdog(status, config.watchdog_seconds, self._stacks_of(parts)), "watchdog")
        await supervisor.run_until(self._evaluate_and_train(parts, supervisor))

    async def _evaluate_and_train(self, parts: _Parts, supervisor: Supervisor) -> None:
        config, status, evaluation = self._config, self._status, parts.evaluation
        draws = DrawSequence(
            config.seed,
            sizes=[(await parts.environments.describe(key)).num_samples for key in parts.keys.training],
            weights=[entry.weight for entry in config.environments],
            first_index=[evaluation.num_reserved(key) for key in parts.keys.training],
        )
        if evaluation.plans and config.eval_before_training:
            await self._interrupt.run_until_first(evaluation.run_all(0, parts.settings, parts.servers))
        status.phase = "training"
        orchestrator = Orchestrator(
            config,
            Services(
                environments=parts.environments,
                environment_keys=parts.keys.training,
                lanes=parts.lanes,
                engines=parts.servers.clients,
                trainer=parts.trainer,
                weights=parts.weights,
                recorder=self._directory.recorder,
                step_log=self._directory.step_log,
                report_engine_failure=parts.servers.report_failure,
            ),
            draws,
            evaluation.held_out_uids,
            parts.settings,
            status,
        )
        self._interrupt.on_first(orchestrator.request_stop)
        training_started_at = time.time()
        await orchestrator.run(supervisor)
        self._training_seconds = time.time() - training_started_at
        if evaluation.plans and config.eval_after_training and not self._interrupt.requested:
            await self._interrupt.run_until_first(evaluation.run_all(status.version, parts.settings, parts.servers))

    async def _refresh_status(self, parts: _Parts) -> None:
        """Keep the numbers of the live view, and the record's gauges, up to date."""
        status, recorder = self._status, self._directory.recorder
        status.num_lanes = sum(server.capacity for server in parts.lanes.servers)
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.5)
            lag = max(loop.time() - before - 0.5, 0.0)
            status.num_generating = parts.lanes.num_used
            now = time.time()
            for name, value in (
                ("event_loop_lag_seconds", lag),
                ("lanes_used", float(parts.lanes.num_used)),
                ("groups_open", float(status.num_open_groups)),
                ("groups_ready", float(status.num_finished_groups)),
                ("tokens_per_second", status.tokens_per_second()),
            ):
                recorder.write("gauges", {"time": now, "name": name, "component": "orchestrator", "value": value})

    def _record_sync(self, report: SyncReport) -> None:
        for part in report.servers:
            self._directory.recorder.write(
                "spans",
                {
                    "name": "weight_sync", "component": "weights", "server": part.server, "step": report.version - 1,
                    "start": part.paused_at or part.started_at, "end": part.resumed_at or report.ended_at,
                    "attributes": {
                        "version": str(report.version),
                        "pause_seconds": f"{part.pause_seconds:.6f}",
                        "transfer_seconds": f"{part.transfer_seconds:.6f}",
                        "bytes": str(report.num_bytes),
                        "failure": part.failure or "",
                    },
                },
            )  # fmt: skip

    def _stacks_of(self, parts: _Parts) -> Any:
        async def dump() -> dict[str, str]:
            return {**await parts.trainer.dump_stacks(), **await parts.inference.dump_stacks()}

        return dump


def default_environment_workers() -> int:
    """Processes for user code when `environment_workers` is null: up to four, one per core."""
    return min(4, len(os.sched_getaffinity(0)))
