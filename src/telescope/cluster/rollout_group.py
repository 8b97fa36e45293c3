"""The rollout workers of a run: one actor each, on any node of the cluster.

An actor loads the environments and the tokenizer, and runs `rollout.worker.RolloutWorker`. The driver's handle replaces
it when its process has exited or does not respond, at most `rollout_max_restarts` times in a run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope.cluster.actors import ActorExited, answer, use_temporary_directory
from telescope.cluster.ray_cluster import Cluster
from telescope.config import TelescopeConfig
from telescope.config.machine import memory_bytes
from telescope.config.memory import GIB
from telescope.config.plan import usual_rollout_workers
from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import DeadlineExceeded, InfrastructureError, UserError
from telescope.record.files import RunFiles
from telescope.rollout.exchange import Orders, Report, WorkerLost
from telescope.rollout.sandbox_rows import SandboxNews, SandboxRecord, sandbox_news
from telescope.rollout.user_thread import report_blocking
from telescope.sandbox.activity import CURRENT, Activity
from telescope.sandbox.ledger import DIRECTORY_VARIABLE
from telescope.utils.process import ignore_sigterm, log_tail, open_log, rotate_log

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_LOG_BYTES = 8 * 2**20
NEWS_SECONDS = 1.0
"""How long a call waits for events of a worker. It is also the worker's heartbeat."""
REPORT_SECONDS = 0.01
"""Shortest time between two reports to the driver, whatever the number of workers, so that reports do not occupy it."""
MAX_REPORT_SECONDS = 0.05
"""Longest time that a report is held back, because a free request slot waits for it."""
SILENCE_SECONDS = 10.0
"""Time after the deadline of user code within which a worker must respond."""
LOAD_SECONDS = 600.0
"""Time to load the environments, downloads included."""
LOG_TAIL_BYTES = 4000
START_ATTEMPTS = 3
"""Start attempts for a replaced worker. Its node may be lost too, a while before Ray notices."""


class RolloutActor:
    """Actor of one rollout worker. Its coroutines run in an event loop in a separate thread.

    The main thread is Ray's, and handles signals. No method is a coroutine, because Ray would then run all methods in
    another thread.
    """

    def __init__(
        self, config_json: str, index: int, run_dir: str, specs: list[EnvironmentSpec], began_at: datetime
    ) -> None:
        from telescope.record.logging import setup_logging

        ignore_sigterm()
        use_temporary_directory()
        os.environ[DIRECTORY_VARIABLE] = run_dir
        self._config = config = TelescopeConfig.from_json(config_json)
        self._specs, self._index, self._began_at, self._sandboxes = specs, index, began_at, Activity()
        setup_logging(Path(run_dir), f"rollout-{index}", None, debug=config.debug, console=False)
        # User code may write to stdout and stderr, which Ray would send to the driver.
        self._log_path = RunFiles(run_dir).log(f"rollout-{index}")
        self._log = open_log(self._log_path)
        for stream in (1, 2):
            os.dup2(self._log.fileno(), stream)
        faulthandler.enable(self._log)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # the OOM killer's first choice
        self._engines: list[Any] = []
        self._worker: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        # If user code forks inside a coroutine, the copy must not continue the other rollouts.
        os.register_at_fork(after_in_child=lambda: self._loop.call_soon(os._exit, 1))

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        CURRENT.set(self._sandboxes)  # for the coroutine, its tasks, and their calls of user code
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def load(self, checks_template: bool) -> tuple[str, list[EnvironmentInfo]]:
        """Loads tokenizer and environments. Returns this node's id and the environments' infos. Raises `UserError`."""
        from telescope.rollout.environments import LoadedEnvironments
        from telescope.rollout.loaded_environment import LoadedEnvironment
        from telescope.rollout.rendering import Renderer, RendererSpec
        from telescope.rollout.worker import RolloutWorker

        config = self._config
        renderer = Renderer(RendererSpec.from_config(config), now=self._began_at)
        paths = [str(Path(place).expanduser().resolve()) for place in config.environments_path]
        loaded = [LoadedEnvironment(spec, renderer, paths, on_stage=_log_stage) for spec in self._specs]
        infos = [each.describe(checks_template=checks_template) for each in loaded]
        environments = LoadedEnvironments(loaded, timeout_seconds=config.environment_timeout_seconds)
        self._run(environments.start())
        most = psutil.Process().memory_info().data + memory_allowance()
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        self._environments = environments
        self._worker = RolloutWorker(environments, self._engines, grouped=not config.enable_individual_sample_lanes)
        watching = _watch(self._log_path, self._log, config.environment_timeout_seconds)
        self._watching = asyncio.run_coroutine_threadsafe(watching, self._loop)
        return ray.get_runtime_context().get_node_id(), infos

    def prepare_resources(self, env_key: str) -> None:
        """Prepares the resources of an environment."""
        self._run(self._environments.prepare_resources(env_key))

    def connect(self, servers: list[tuple[str, str]], first_version: int) -> None:
        """Connects to the inference servers, by address and secret. They start with policy version `first_version`."""
        from telescope.inference.base import backend_of

        async def connect() -> None:
            backend, config = backend_of(self._config), self._config
            self._engines[:] = [backend.connect(config, url, secret, i) for i, (url, secret) in enumerate(servers)]
            for engine in self._engines:
                engine.initial_version = first_version

        self._run(connect())

    @ray.method(concurrency_group="exchange")
    def exchange(self, orders: Orders, seconds: float | None, interval: float, versions: list[int]) -> Report:
        """Calls `RolloutWorker.exchange`. `versions` are the servers' policy versions."""
        for engine, version in zip(self._engines, versions, strict=False):
            engine.loaded_version = version
        report: Report = self._run(self._worker.exchange(orders, seconds=seconds, interval=interval))
        report.sandboxes = sandbox_news(self._sandboxes, self._index)
        return report

    def stop(self) -> SandboxNews | None:
        """Ends rollouts and closes resources. Returns the last sandbox activity."""
        if self._worker is not None:
            self._run(self._worker.close())
            self._run(self._environments.close())
        return sandbox_news(self._sandboxes, self._index)


def _log_stage(stage: str, doing: str) -> None:
    print(f"{doing} ...", file=sys.stderr, flush=True)


async def _watch(path: Path, log: BinaryIO, seconds: float) -> None:
    """Limits the log's size. Writes to it what blocks the event loop, and after `seconds` all stacks."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(report_blocking())
        while True:
            faulthandler.dump_traceback_later(seconds, file=log)
            rotate_log(path, MAX_LOG_BYTES)
            await asyncio.sleep(1.0)


def memory_allowance() -> int:
    """Returns how many bytes a worker may allocate in addition to what it has loaded. Further allocations fail.

    It is a quarter of the memory, and at least 2 GiB: a reward that never stops allocating fails before the engine or
    the trainer does.
    """
    return max(memory_bytes() // 4, 2 * GIB)


class RolloutHandle:
    """Driver-side handle of one actor: a `rollout.pool.Worker`."""

    def __init__(self, group: RolloutGroup, index: int) -> None:
        self._group, self.index = group, index
        self.num_starts = 0
        self.node = ""
        """Ray's id of its node."""
        self.arrived = 0.0
        """When it moved to this node from another one, in monotonic time."""
        self.actor: Any = None
        self._is_loaded = False

    @property
    def _name(self) -> str:
        return f"rollout worker {self.index}"

    async def start(self, *, checks_template: bool = False) -> list[EnvironmentInfo]:
        """Starts the actor. Returns the descriptions of its environments."""
        self.num_starts += 1
        self._is_loaded = False
        group = self._group
        self.actor = group.make_actor(self.index)
        node, infos = await self.call("loading its environments", "load", checks_template)
        if self.node not in ("", node):
            self.arrived = time.monotonic()
        self.node, self._is_loaded = node, True
        if group.engines:
            await self.connect()
        return list(infos)

    async def connect(self) -> None:
        """Connects the worker to the group's servers."""
        await self.call("connecting to the servers", "connect", self._group.engines, self._group.first_version)

    async def call(self, doing: str, method: str, *values: Any, seconds: float = LOAD_SECONDS) -> Any:
        """Calls a method of the actor. Ends the process and raises `DeadlineExceeded` after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                return await answer(getattr(self.actor, method).remote(*values), self._name)
        except TimeoutError:
            await self.kill()
            what = f"{self._name} did not finish {doing} within {seconds:g} s{self.log_end()}"
            raise DeadlineExceeded(what) from None
        except ActorExited as error:
            raise InfrastructureError(f"{self._name} exited while {doing}{self.log_end()}") from error

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        """Implements `rollout.pool.Worker.exchange`."""
        call = self.actor.exchange.remote(orders, seconds, interval, self._group.versions())
        silence = (seconds or 0.0) + interval + self._group.config.environment_timeout_seconds + SILENCE_SECONDS
        try:
            async with asyncio.timeout(silence):
                report: Report = await answer(call, self._name)
        except TimeoutError:
            await self.kill()
            what = "user code blocks its event loop"
            raise WorkerLost(f"{self._name} did not answer for {silence:g} s: {what}{self.log_end()}") from None
        except ActorExited as error:
            raise WorkerLost(f"{self._name} exited{self.log_end()}") from error
        self._group.sandboxes.add(self.index, report.sandboxes)
        return report

    async def restart(self) -> None:
        """Restarts the worker. Raises `InfrastructureError` after `rollout_max_restarts`."""
        limit = self._group.config.rollout_max_restarts
        self._group.sandboxes.lost(self.index)
        for attempts_left in reversed(range(START_ATTEMPTS)):
            await self.kill()
            if next(self._group.restarts) >= limit:
                raise InfrastructureError(
                    f"{self._name} has to be replaced, after {limit} rollout workers already (rollout_max_restarts). "
                    f"Find the cause in their logs{self.log_end()}"
                )
            logger.warning("%s is being replaced", self._name)
            try:
                await self.start()
                return
            except (InfrastructureError, DeadlineExceeded):
                if not attempts_left:
                    raise

    async def kill(self) -> None:
        """Ends the process at once."""
        await asyncio.to_thread(ray.kill, self.actor)

    async def stop(self) -> None:
        """Ends rollouts, closes resources, and ends the process."""
        if self.actor is None:
            return
        try:
            if self._is_loaded:  # otherwise it responds only once it has loaded
                async with asyncio.timeout(self._group.stop_seconds):
                    self._group.sandboxes.add(self.index, await answer(self.actor.stop.remote(), self._name))
        except Exception as error:
            logger.warning("%s did not stop by itself: %r", self._name, error)
        await self.kill()

    def log_end(self) -> str:
        """Returns the end of the worker's log, for an error message."""
        path = RunFiles(self._group.run_dir).log(f"rollout-{self.index}")
        tail = log_tail(path, LOG_TAIL_BYTES)
        return f"; its log ({path}) ends:\n{tail}" if tail else ""


class RolloutGroup:
    """All rollout workers. `infos` describe the environments once the workers are started.

    `write` gets rows of the record about sandboxes.
    """

    def __init__(
        self,
        config: TelescopeConfig,
        specs: Sequence[EnvironmentSpec],
        run_dir: Path,
        cluster: Cluster,
        write: Callable[[str, Any], None] = lambda table, row: None,
    ) -> None:
        self.sandboxes = SandboxRecord(write)
        self.config, self.specs, self.run_dir = config, list(specs), run_dir
        self.restarts = itertools.count()
        self.first_version = 0
        self._began_at = datetime.now()
        """Time that chat templates show in all prompts."""
        self.engines: list[tuple[str, str]] = []
        """Address and secret of the servers, once they are started."""
        self.versions: Any = list
        self.stop_seconds = 5.0
        options: dict[str, Any] = {"num_cpus": config.rollout_cpus_per_worker, "concurrency_groups": {"exchange": 4}}
        self._actor_class: Any = ray.remote(**options)(RolloutActor)
        num_workers = config.chosen_rollout_workers or usual_rollout_workers(config, cluster.resources.cpus)
        self.handles = [RolloutHandle(self, index) for index in range(num_workers)]
        self._nodes = [cluster.driver_node, *(node for node in cluster.node_names if node != cluster.driver_node)]
        self.infos: list[EnvironmentInfo] = []

    @property
    def report_interval(self) -> float:
        """Returns the shortest time between two reports of one worker, in seconds."""
        return min(REPORT_SECONDS * len(self.handles), MAX_REPORT_SECONDS)

    def make_actor(self, index: int) -> Any:
        """Starts a worker's process. With SPREAD, workers are placed on the remaining nodes in turn."""
        strategy: Any = "DEFAULT"
        if self.config.rollout_placement_strategy == "SPREAD":  # Ray's own SPREAD leaves nodes out
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            nodes = [node for node in self._nodes if node in alive]
            strategy = NodeAffinitySchedulingStrategy(nodes[index % len(nodes)], soft=False)
        actor = self._actor_class.options(scheduling_strategy=strategy)
        return actor.remote(self.config.to_json(), index, str(self.run_dir), self.specs, self._began_at)

    async def start(self) -> None:
        """Starts all workers. Raises the first error; it is a `UserError` if the user can fix it."""
        starts = [handle.start(checks_template=handle.index == 0) for handle in self.handles]
        found = await asyncio.gather(*starts)
        self.infos = found[0]
        for spec, mine, *others in zip(self.specs, *found, strict=True):
            for theirs in others:
                if (mine.num_samples, mine.dataset_digest) != (theirs.num_samples, theirs.dataset_digest):
                    raise UserError(
                        f"The environment {spec.name!r} loads a different dataset in each process: {mine.num_samples} "
                        f"and {theirs.num_samples} items, or other items. Use a generator with a fixed seed, and "
                        "sort sets and directory listings."
                    )
        if any(info.shares_resources or info.ends_rollouts for info in self.infos):
            self.stop_seconds = 30.0

    def homes(self, key: str) -> Iterable[int]:
        """Returns the workers that run an environment: all, or one per node if its resources exist once per node.

        The one on a node is the worker that has been there longest.
        """
        pairs = zip(self.specs, self.infos, strict=True)
        if not any(info.shares_resources for spec, info in pairs if spec.identity == key):
            return range(len(self.handles))
        newest_first = sorted(self.handles, key=lambda handle: (handle.arrived, handle.index), reverse=True)
        return sorted({handle.node: handle.index for handle in newest_first}.values())

    async def prepare_resources(self) -> None:
        """Prepares the shared resources of all environments that have any."""
        # Each environment has its own deadline in the worker, which prepares them one after the other.
        seconds = LOAD_SECONDS * len(self.specs) + SILENCE_SECONDS
        calls = [
            self.handles[home].call("preparing resources", "prepare_resources", spec.identity, seconds=seconds)
            for spec, info in zip(self.specs, self.infos, strict=True)
            if info.shares_resources
            for home in self.homes(spec.identity)
        ]
        await asyncio.gather(*calls)

    async def connect(self, engines: list[tuple[str, str]], versions: Any, first_version: int = 0) -> None:
        """Connects all workers to the servers. `versions` returns the policy version of each."""
        self.engines, self.versions, self.first_version = engines, versions, first_version
        await asyncio.gather(*(handle.connect() for handle in self.handles))

    async def stop(self) -> None:
        """Stops all workers."""
        await asyncio.gather(*(handle.stop() for handle in self.handles))
        self.sandboxes.write_gauges()
