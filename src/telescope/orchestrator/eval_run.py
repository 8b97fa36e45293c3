"""Evaluates saved checkpoints and models: from the request to the results.

One pool of servers measures all models; each is loaded into the running engines (`folder_weights`). Environments,
servers and sampling are those of a training run (`run_components`, `evaluation`), without a trainer. Finished samples
are kept in `samples.jsonl` of the output folder, so that the same evaluation continues after an interruption.

Results go to the record of the run that the checkpoints belong to, or to that of the output folder without a run or if
it is live.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from telescope.cluster.inference_group import InferenceGroup
from telescope.cluster.placement import network_of, reserve
from telescope.cluster.ray_cluster import watch_daemons
from telescope.cluster.reaper import Reaper
from telescope.config import EvalEntry, TelescopeConfig
from telescope.config.eval_config import EvalRequest, build_eval_config, measurement_digest
from telescope.config.machine import local_resources, ray_cluster_is_configured
from telescope.config.model_checks import check_report
from telescope.config.model_files import inspect_model
from telescope.config.plan import plan_placement
from telescope.errors import ConfigError, UserError
from telescope.evals.entries import EnvironmentKeys, environment_keys
from telescope.evals.runner import EvalResult, SamplesFile, plan_eval
from telescope.orchestrator import preflight
from telescope.orchestrator.eval_targets import EvalTarget, find_targets
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.folder_weights import FolderWeights
from telescope.orchestrator.run import View
from telescope.orchestrator.run_components import (
    all_or_first_failure,
    connect_cluster,
    make_server_pool,
    start_environments,
    start_rollouts,
    start_servers,
)
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Interrupt, Supervisor, watchdog
from telescope.record.logging import setup_logging
from telescope.record.reader import Run, is_run
from telescope.record.recorder import Recorder
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings
from telescope.rollout.worker_pool.pool import EnvironmentPool

logger = logging.getLogger(__name__)

OUTPUTS = "evals"  # folder of evaluations, in the run directory or the current one


@dataclass(frozen=True)
class EvalJob:
    """A checked evaluation. `numbers` are the evals' numbers in the run, or new ones.

    `run_dir` is the run whose record receives the results; None: the record of the output folder.
    """

    config: TelescopeConfig
    targets: list[EvalTarget]
    numbers: list[int]
    digest: str
    """Of all settings that change results."""
    output: Path
    run_dir: Path | None
    notes: list[str]

    @property
    def session(self) -> str:
        """Returns the prefix of the ids of its evals, which makes them unique in the run's record."""
        return f"standalone-{self.digest}"

    def eval_names(self) -> dict[str, str]:
        """Returns the ids of its evals in the record, and their names, with their numbers if ambiguous."""
        names = [entry.name for entry in self.config.evals]
        return {
            f"{self.session}-eval{number}-{name}-v{self.version_of(target)}": f"{name}#{number}"
            if names.count(name) > 1
            else name
            for name, number in zip(names, self.numbers, strict=True)
            for target in self.targets
        }

    def version_of(self, target: EvalTarget) -> int:
        """Returns the step of a target, or its index if steps repeat."""
        return target.step if has_steps(self.targets) and target.step is not None else self.targets.index(target)


def has_steps(targets: Sequence[EvalTarget]) -> bool:
    """Returns whether all targets have distinct steps."""
    steps = [target.step for target in targets]
    return None not in steps and len(set(steps)) == len(steps)


@dataclass(frozen=True)
class TargetResult:
    """The results of one model."""

    target: EvalTarget
    version: int
    results: list[EvalResult]


@dataclass(frozen=True)
class EvalOutcome:
    """All results, and sentences about evals without one."""

    job: EvalJob
    results: list[TargetResult]
    problems: list[str]


def prepare(
    request: EvalRequest,
    sources: Sequence[str],
    *,
    steps: Sequence[int] | None = None,
    names: Sequence[str] = (),
    num_samples: int | None = None,
    output: Path | None = None,
) -> EvalJob:
    """Checks an evaluation of `names`, else of the request's or the run's evals. Raises `UserError`."""
    targets = find_targets(request.command, sources, steps)
    run_config = next((values for target in targets if (values := target.run_config()) is not None), None)
    runs = {target.run_dir for target in targets}
    run_dir = next(iter(runs)) if len(runs) == 1 and has_steps(targets) else None
    entries_of_run = [EvalEntry.model_validate(entry) for entry in (run_config or {}).get("evals", [])]
    entries = choose_evals(request.command.evals, entries_of_run, names, num_samples)
    config = build_eval_config(request, run_config, entries, targets[0].model_files_folder())
    config, fitted = preflight.fit_to_machine(config, with_trainer=False)
    digest = measurement_digest(config, entries)
    if output is None:
        root = run_dir / OUTPUTS if run_dir is not None else Path(OUTPUTS)
        name = "" if run_dir is not None else f"{Path(targets[0].label).name}-"
        output = root / f"{name}{digest}"
    config = config.replace(run_dir=str(output.absolute()))
    notes = [*request.notes, *fitted]
    if run_dir is not None and (status := Run(run_dir).status) in ("live", "unknown"):
        notes += [f"{run_dir} is live, so results are recorded in {output}"] if status == "live" else []
        run_dir = None
    job = EvalJob(config, targets, eval_numbers(entries, entries_of_run), digest, output.absolute(), run_dir, notes)
    checks = (
        preflight.check_packages, preflight.check_plugin, preflight.check_ray_address, check_placement,
        preflight.check_open_files, preflight.check_shared_memory, preflight.check_ports, preflight.check_evals,
    )  # fmt: skip
    if problems := preflight.find_problems(config, checks):
        raise ConfigError("\n".join(problems))
    _check_output(job)
    return job


def choose_evals(
    given: Sequence[EvalEntry], entries_of_run: Sequence[EvalEntry], names: Sequence[str], num_samples: int | None
) -> list[EvalEntry]:
    """Returns the evals in `names`, else those of the file, else those of the run, with their settings.

    Raises `UserError` if there are none.
    """
    known = {entry.name: entry for entry in reversed((*given, *entries_of_run))}
    chosen = [*given] if not names else [known.get(name, EvalEntry(name=name)) for name in names]
    chosen = chosen or list(entries_of_run)
    if not chosen:
        raise UserError(
            "No eval is given. Name an eval or environment, as in --eval math500, or a file with "
            "`evals`. `telescope envs list` lists environments"
        )
    if num_samples is not None:
        try:
            chosen = [EvalEntry.model_validate(entry.model_dump() | {"num_samples": num_samples}) for entry in chosen]
        except ValidationError as error:
            raise UserError(f"--num-samples is {num_samples}: {error.errors()[0]['msg']}") from None
    return chosen


def eval_numbers(entries: Sequence[EvalEntry], entries_of_run: Sequence[EvalEntry]) -> list[int]:
    """Returns each eval's number, on which its seeds depend. It is that of the run's eval of the same name."""
    free = {number: entry.name for number, entry in enumerate(entries_of_run)}
    numbers, later = [], len(entries_of_run)
    for entry in entries:
        same = next((number for number, name in free.items() if name == entry.name), None)
        if same is None:
            same, later = later, later + 1
        else:
            del free[same]
        numbers.append(same)
    return numbers


def check_placement(config: TelescopeConfig) -> None:
    """Checks that the servers fit this machine, unless they join a cluster."""
    if not ray_cluster_is_configured(config.ray_address):
        plan_placement(config, local_resources(), with_trainer=False)


def _check_output(job: EvalJob) -> None:
    """Makes the output folder. Raises `UserError` if it holds another measurement or cannot be written."""
    marker = job.output / "measurement"
    try:
        job.output.mkdir(parents=True, exist_ok=True)
        if marker.is_file() and marker.read_text() != job.digest:
            raise UserError(
                f"{job.output} holds results with other settings ({marker.read_text()}, now {job.digest}). Choose "
                "another --output, or leave it out"
            )
        marker.write_text(job.digest)
    except OSError as error:
        raise UserError(f"{job.output} cannot be written: {error}. Choose another folder with --output") from error


def run_evals(job: EvalJob, view: View | None = None) -> EvalOutcome:
    """Measures all models of a job. Raises `Interrupted` after Ctrl-C, otherwise the first error of any component."""
    return asyncio.run(_EvalRun(job, view).run())


class _EvalRun:
    def __init__(self, job: EvalJob, view: View | None) -> None:
        self._job = job
        self._view = view
        self._status = RunStatus("eval", 0)
        self._status.messages.extend(job.notes)
        self._interrupt = Interrupt(self._status, "stopping")
        self._scratch = job.output / "models"
        """Converted checkpoints, removed when they are measured."""
        self._results: list[TargetResult] = []
        self._problems: list[str] = []

    async def run(self) -> EvalOutcome:
        job = self._job
        async with AsyncExitStack() as stack:
            shutil.rmtree(self._scratch, ignore_errors=True)
            stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            reaper = stack.enter_context(Reaper())
            info = Run(job.run_dir).info if job.run_dir is not None else None
            if job.run_dir is None or info is None:
                recorder = stack.enter_context(Recorder(job.output))
            else:
                recorder = stack.enter_context(Recorder(job.run_dir, attempt=info.attempt))
            setup_logging(job.output, "driver", None, debug=job.config.debug, console=self._view is None)
            recorded = [_ids(recorder.files.run_dir, table) for table in ("samples", "eval_samples")]
            samples = stack.enter_context(SamplesFile(job.output / "samples.jsonl", recorded))
            if self._view is not None:
                stack.callback(self._view.stop)
                self._view.start(self._status)
            self._interrupt.install(asyncio.get_running_loop())
            async with AsyncExitStack() as parts:
                supervisor = Supervisor()
                await supervisor.run_until(self._measure(supervisor, parts, reaper.directory, recorder, samples))
            self._status.phase = "done"
        return EvalOutcome(job, self._results, self._problems)

    async def _measure(
        self, supervisor: Supervisor, stack: AsyncExitStack, temporary: Path, recorder: Recorder, samples: SamplesFile
    ) -> None:
        job, status, config = self._job, self._status, self._job.config
        directory = RunDirectory(job.output, config, [])
        status.phase = "loading evals"
        keys = keys_of_evals(config)
        environments = await self._interrupt.run_until_first(start_environments(config, keys, directory, status, stack))
        settings = RolloutSettings.from_config(config, environments.stops)
        plans = [
            replace(await plan_eval(entry, key, environments, settings.sampling, number), session=job.session)
            for entry, key, number in zip(config.evals, keys.evals, job.numbers, strict=True)
        ]
        rollouts, weights = RolloutPool([]), None
        servers = make_server_pool(config, None, rollouts.open_lane(TRAINING, []), status)
        if not all(samples.has_all(target.identity(), plans) for target in job.targets):
            starting = self._start_servers(environments, supervisor, directory, stack, temporary)
            rollouts, servers, weights = await self._interrupt.run_until_first(starting)
        evaluation = Evaluation(
            plans, config, rollouts, servers, settings, recorder, status, supervisor.spawn,
            problems=self._problems, samples=samples, recorded=self._recorded(recorder.files.run_dir),
        )  # fmt: skip
        for target in job.targets:
            version, samples.model = job.version_of(target), target.identity()
            if weights is not None and target is not job.targets[0]:
                await self._interrupt.run_until_first(self._load(target, version, weights, servers))
            results = await self._interrupt.run_until_first(evaluation.run_all(version))
            self._results.append(TargetResult(target, version, results))

    def _recorded(self, run_dir: Path) -> frozenset[str]:
        """Returns the ids of finished evals in a record."""
        rows = Run(run_dir).table("evals", columns=["eval_id", "status"]).to_pylist() if is_run(run_dir) else []
        return frozenset(row["eval_id"] for row in rows if row["status"] == "finished")

    async def _load(self, target: EvalTarget, version: int, weights: FolderWeights, servers: ServerPool) -> None:
        """Loads a model into the servers. Removes the previous one, except the first."""
        previous, folder = weights.folder, await self._folder_of(target)
        self._status.phase = f"loading {target.description}"
        await weights.use(folder, version, servers.up)
        if previous.parent == self._scratch and str(previous) != weights.config.model:
            shutil.rmtree(previous)  # a server that restarts begins with the first

    async def _folder_of(self, target: EvalTarget) -> Path:
        self._status.phase = f"preparing {target.description}"
        return await asyncio.to_thread(target.model_folder, self._scratch, self._job.config.engine_dtype)

    async def _start_servers(
        self,
        environments: EnvironmentPool,
        supervisor: Supervisor,
        directory: RunDirectory,
        stack: AsyncExitStack,
        temporary: Path,
    ) -> tuple[RolloutPool, ServerPool, FolderWeights]:
        """Starts the servers with the first model. They end with `stack`."""
        job, status = self._job, self._status
        folder = (await self._folder_of(job.targets[0])).absolute()
        config = job.config.replace(model=str(folder))
        check_report(config, await asyncio.to_thread(inspect_model, config))
        loop = asyncio.get_running_loop()

        def on_ray_started() -> None:
            self._interrupt.install(loop)
            supervisor.spawn(watch_daemons(), "Ray's daemons")

        cluster = await connect_cluster(config, directory, status, stack, temporary, on_ray_started)
        placement = await reserve(config, plan_placement(config, cluster.resources, with_trainer=False))
        stack.callback(placement.remove)
        network = network_of(config, placement, cluster.driver_node)
        status.phase = "starting the inference servers"
        inference = InferenceGroup(config, placement, directory.path, cluster, network, secrets.token_urlsafe(32))
        stack.push_async_callback(inference.stop)
        await all_or_first_failure(*start_servers(config, inference, status))
        stack.push_async_callback(inference.close_clients)
        rollouts = start_rollouts(config, environments, inference.clients, stack)
        slots = rollouts.open_lane(TRAINING, [config.lanes_per_server] * config.num_inference_servers)
        servers = make_server_pool(config, inference, slots, status)
        rollouts.on_engine_failure = servers.report_failure
        weights = FolderWeights(config, inference.clients, folder, job.version_of(job.targets[0]))
        servers.bring_weights = weights.sync_one
        for index in range(config.num_inference_servers):
            servers.open(index)
        supervisor.spawn(servers.watch(), "server watch")
        supervisor.spawn(watchdog(status, config.watchdog_seconds, inference.dump_stacks), "watchdog")
        return rollouts, servers, weights


def _ids(run_dir: Path, table: str) -> frozenset[str]:
    """Returns the ids of samples in a table of a record. Empty without one."""
    return frozenset(Run(run_dir).table(table, columns=["sample_id"])[0].to_pylist() if is_run(run_dir) else [])


def keys_of_evals(config: TelescopeConfig) -> EnvironmentKeys:
    """Returns the `environment_keys` of evals, which share settings with the run's environments."""
    keys = environment_keys(config)
    specs = [spec for spec in keys.specs if spec.key in keys.evals]
    return EnvironmentKeys(specs, [], keys.evals)
