"""Evaluates saved checkpoints and models, from the request to the results.

One pool of servers measures all models; each is loaded into the running engines, in place. Every worker reads the
folder itself, with the loading code of a weight sync, and its fingerprints are compared with the files. Environments,
servers and sampling are those of a training run (`run_components`, `evaluation`), without a trainer. Finished samples
are kept in `samples.jsonl` in the output folder, so that the same evaluation can continue after an interruption.

Results go to the record of the run that the checkpoints belong to. Without such a run, or if it is live, they go to a
record in the output folder.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from telescope.config import EvalEntry, TelescopeConfig
from telescope.config.eval_config import EvalRequest, build_eval_config, known_evals, measurement_digest
from telescope.config.messages import describe_argument
from telescope.config.model_checks import check_report
from telescope.config.model_files import inspect_model
from telescope.errors import ConfigError, InfrastructureError, RunError, UserError
from telescope.evals.runner import EvalResult, SamplesFile
from telescope.inference.base import EngineBackend
from telescope.orchestrator import preflight
from telescope.orchestrator.eval_targets import EvalTarget, find_targets
from telescope.orchestrator.evaluation import Evaluation
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.session import Session, View
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import with_progress
from telescope.record.files import STANDALONE
from telescope.record.logging import setup_logging
from telescope.record.reader import Run, eval_names
from telescope.record.recorder import Recorder
from telescope.weights.model_folder import folder_metas
from telescope.weights.plan import UpdateInfo, make_update
from telescope.weights.probe import compare

logger = logging.getLogger(__name__)

OUTPUTS = "evals"  # folder of evaluations, in the run directory or the current one


@dataclass(frozen=True)
class EvalJob:
    """A checked evaluation. `numbers` are the evals' numbers in the run, or new numbers.

    `run_dir` is the run whose record receives the results. If it is None, the record is in the output folder.
    """

    config: TelescopeConfig
    targets: list[EvalTarget]
    numbers: list[int]
    digest: str
    """Digest of all settings that change results."""
    output: Path
    run_dir: Path | None
    notes: list[str]

    @property
    def session(self) -> str:
        """Returns the id prefix of this job's evals, which makes them unique in the run's record."""
        return f"{STANDALONE}{self.digest}"

    def eval_names(self) -> dict[str, str]:
        """Returns the names of this job's evals by their ids in the record. Ambiguous names include the number."""
        named = eval_names(self.config.values)
        return {
            f"{self.session}-eval{number}-{entry.name}-v{self.version_of(target)}": named(entry.name, number)
            for entry, number in zip(self.config.evals, self.numbers, strict=True)
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
    """All results, and a sentence for each eval without a result."""

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
    """Checks an evaluation of `names`, or by default the request's or the run's evals. Raises `UserError`."""
    targets = find_targets(request.command, sources, steps)
    run_config = next((values for target in targets if (values := target.run_config()) is not None), None)
    runs = {target.run_dir for target in targets}
    run_dir = next(iter(runs)) if len(runs) == 1 and has_steps(targets) else None
    entries_of_run = [EvalEntry.model_validate(entry) for entry in (run_config or {}).get("evals", [])]
    entries = choose_evals(*known_evals(request, entries_of_run), names, num_samples)
    config = build_eval_config(request, run_config, entries, targets[0].model_files_folder())
    config, fitted = preflight.fit_to_machine(config, with_trainer=False)
    digest = measurement_digest(config, config.evals)
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
    placement = preflight.Check(partial(preflight.check_placement, with_trainer=False), alone=True)
    if problems := preflight.find_problems([placement, *(c for c in preflight.CHECKS if c.evals)], config):
        raise ConfigError("\n".join(problems))
    if not targets[0].is_native:  # the files of a checkpoint's model are complete only after its conversion
        _check_model(config, targets[0].path)
    _check_output(job)
    return job


def choose_evals(
    given: Sequence[EvalEntry], entries_of_run: Sequence[EvalEntry], names: Sequence[str], num_samples: int | None
) -> list[EvalEntry]:
    """Returns the evals in `names`, or else the file's evals, or else the run's evals, with their settings.

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
            raise UserError(describe_argument(error, "--num-samples", num_samples)) from None
    return chosen


def eval_numbers(entries: Sequence[EvalEntry], entries_of_run: Sequence[EvalEntry]) -> list[int]:
    """Returns each eval's number, which determines its seeds. It equals the number of the run's eval with that name."""
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


def _check_model(config: TelescopeConfig, folder: Path) -> TelescopeConfig:
    """Returns the config for the model in `folder`. Raises `ConfigError` if it cannot be sampled."""
    config = config.replace(model=str(folder.absolute()))
    check_report(config, inspect_model(config))
    return config


def _check_output(job: EvalJob) -> None:
    """Creates the output folder. Raises `UserError` if it has results of other settings or cannot be written."""
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
        self._status = RunStatus("eval", 0)
        self._status.messages.extend(job.notes)
        self._session = Session(self._status, view)
        self._scratch = job.output / "models"
        """Folder of converted checkpoints, each removed after it is measured."""
        self._results: list[TargetResult] = []
        self._problems: list[str] = []

    async def run(self) -> EvalOutcome:
        job, session = self._job, self._session
        shutil.rmtree(self._scratch, ignore_errors=True)
        session.stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
        info = Run(job.run_dir).info if job.run_dir is not None else None
        run_dir, attempt = (job.output, 1) if job.run_dir is None or info is None else (job.run_dir, info.attempt)
        with session.open(Recorder(run_dir, attempt=attempt)) as recorder:
            setup_logging(job.output, "driver", None, debug=job.config.debug, console=not session.has_view)
            recorded = [Run(run_dir).values(table, "sample_id") for table in ("samples", "eval_samples")]
            with SamplesFile(job.output / "samples.jsonl", recorded) as samples:
                await session.run(session.interrupt.run_until_first(self._measure(recorder, samples)))
            self._status.phase = "done"
        return EvalOutcome(job, self._results, self._problems)

    async def _measure(self, recorder: Recorder, samples: SamplesFile) -> None:
        job, status, first = self._job, self._status, self._job.targets[0]
        directory = RunDirectory(job.output, job.config, [])
        directory.recorder = recorder

        async def choose_model(components: RunComponents) -> TelescopeConfig | None:
            """Returns the config of servers with the first model, or None if all samples exist."""
            components.evals = [
                replace(plan, number=number, session=job.session)
                for plan, number in zip(components.evals, job.numbers, strict=True)
            ]
            if all(samples.has_all(target.identity(), components.evals) for target in job.targets):
                return None
            components.first_version = job.version_of(first)
            return await asyncio.to_thread(_check_model, job.config, await self._folder_of(first))

        components = await self._session.start(job.config, directory, with_trainer=False, on_data=choose_model)
        servers, folder = components.servers, Path(components.config.model)
        weights = FolderWeights(components.config, servers.clients, folder, components.first_version)
        servers.bring_weights = weights.sync_one
        finished = Run(recorder.files.run_dir).values("evals", "eval_id", status="finished")
        evaluation = Evaluation(
            components.evals, components.config, components.rollouts, servers, components.settings, recorder, status,
            self._session.supervisor.spawn, problems=self._problems, samples=samples, recorded=finished,
        )  # fmt: skip
        for target in job.targets:
            version, samples.model = job.version_of(target), target.identity()
            if servers.clients and target is not first:
                previous, folder = folder, await with_progress(status, self._folder_of(target))
                status.phase = f"loading {target.description}"
                weights.folder, weights.version = folder, version
                await with_progress(status, servers.update(servers.up, version))
                if previous.parent == self._scratch and str(previous) != components.config.model:
                    shutil.rmtree(previous)  # a restarted server begins with the first model
            self._results.append(TargetResult(target, version, await evaluation.run_all(version)))

    async def _folder_of(self, target: EvalTarget) -> Path:
        self._status.phase = f"preparing {target.description}"
        return await asyncio.to_thread(target.model_folder, self._scratch, self._job.config.engine_dtype)


@dataclass
class FolderWeights:
    """The weights that the servers should have, initially those that they start with. `version` numbers them.

    `sync_one` loads one server at a time, and never loads the same folder twice.
    """

    config: TelescopeConfig
    clients: Sequence[EngineBackend]
    folder: Path
    version: int

    def __post_init__(self) -> None:
        self._locks = [asyncio.Lock() for _ in self.clients]
        self._loaded: dict[int, int] = dict.fromkeys(range(len(self.clients)), self.version)
        """Version of the verified weights of each server."""

    async def sync_one(self, server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        """Loads the folder into one server, unless an old process has it. Calls `on_loaded` before any other load.

        Raises InfrastructureError if the server fails, and RunError if it has loaded other weights.
        """
        client = self.clients[server]
        async with self._locks[server]:
            if fresh or self._loaded.get(server) != self.version:
                self._loaded.pop(server, None)
                version = self.version
                update = make_update(
                    folder_metas(self.folder),
                    version=version,
                    dtype=self.config.engine_dtype,
                    bucket_mb=self.config.weight_broadcast_bucket_mb,
                    timeout_seconds=self.config.weight_sync_timeout_seconds,
                    folder=str(self.folder.absolute()),
                )
                await load_folder(client, update)
                self._loaded[server] = version
            on_loaded()


async def load_folder(client: EngineBackend, update: UpdateInfo) -> None:
    """Pauses a server, loads a model folder and verifies it. Raises RunError if other weights were loaded."""
    await client.pause()
    await client.transfer_mode()  # ends an update that failed in one worker and is still open in others
    await client.start_update()
    await client.update_weights(update)
    await client.finish_update(update.version)
    await client.resume()
    loaded = await client.fingerprints()
    if not loaded:
        raise InfrastructureError(f"no worker of {client.base_url} answered")
    report = await asyncio.to_thread(compare, sent=loaded[0]["read"], loaded=loaded)
    if not report.ok:
        raise RunError(f"server {client.server_index} has not loaded the weights of {update.folder}: {report}")
    logger.info("server %d has loaded %s: %s", client.server_index, update.folder, report)
