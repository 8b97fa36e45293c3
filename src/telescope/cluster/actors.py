"""The Ray actors of a run: one per inference server, per trainer rank, and per machine without the driver.

Actors are thin: each parses the config that it receives (never one from disk), creates the plain class of its package
and forwards calls. Each reports the hash of its config, dumps its stacks, and stops the processes that it started.
"""

import asyncio
import faulthandler
import logging
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope.cluster.placement import own_host, use_interface_of
from telescope.cluster.ray_cluster import Cluster, daemon_failure, own_address
from telescope.cluster.reaper import MARK_VARIABLE, temporary_variables
from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError, RunError, UserError
from telescope.inference.base import Address
from telescope.inference.engine_metrics import metrics_reader
from telescope.record.files import RunFiles
from telescope.record.gauges import ReadingBatch, Sampler
from telescope.record.system_metrics import MachineSampler, memory_reader
from telescope.utils.process import ignore_sigterm, open_log, thread_stacks
from telescope.weights.control_channel import listen
from telescope.weights.plan import UpdateInfo

ACTOR_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 4, "observe": 1, "checkpoint": 1},
}
"""Ray never restarts an actor, because its state is weights and processes. Calls in the concurrency groups run while
the actor works; calls in `observe` run even while calls in `control` wait for engines."""

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
DAEMON_EXIT_SECONDS = 0.5
"""A stopping raylet ends its actors first. It has exited after this time."""


def make_actor(actor_class: type, placement: dict[str, Any]) -> Any:
    """Returns the Ray actor class of a class, with its `placement`. `.remote(...)` starts an actor."""
    return ray.remote(**ACTOR_OPTIONS, **placement)(actor_class)


def use_temporary_directory() -> None:
    """Sends temporary files to the run's directory, if this machine has it.

    Actors of a joined cluster would use the cluster's directory, where nothing removes their files.
    """
    directory = os.environ.get(MARK_VARIABLE)
    if directory and os.access(directory, os.W_OK):
        os.environ.update(temporary_variables(directory))
        tempfile.tempdir = None  # read TMPDIR again


class InferenceActor:
    """Actor of one engine process, supervised by `inference.server.InferenceServer`."""

    def __init__(self, config_json: str, address: Address, run_dir: str, broadcast_on_loopback: bool) -> None:
        from telescope.inference.server import InferenceServer

        ignore_sigterm()
        use_temporary_directory()
        config = TelescopeConfig.from_json(config_json)
        # The engine and its workers inherit the environment. Their NCCL must connect to the trainer's.
        use_interface_of(own_host(loopback=broadcast_on_loopback))
        self._server = InferenceServer(config, address, config.model, Path(run_dir), node_address=own_address())
        self._metrics = Sampler(
            "engine metrics",
            config.system_metrics_collection_interval_seconds,
            metrics_reader(self._server.metrics_text),
        )

    def start(self) -> Any:
        """Starts the process and waits until it responds. Returns its `ServerInfo`."""
        info = self._server.start()
        self._metrics.start()
        return info

    @ray.method(concurrency_group="observe")
    def take_readings(self) -> ReadingBatch:
        """Returns the server's metrics since the last call."""
        return add_gpus(self._metrics.take())

    @ray.method(concurrency_group="control")
    def status(self) -> Any:
        return self._server.status()

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Stops the engine process and all its children."""
        self._metrics.stop()
        self._server.stop()


class TrainerActor:
    """Actor of one trainer rank and its weight sender."""

    def __init__(self, config_json: str, rank: int, world_size: int, run_dir: str) -> None:
        use_temporary_directory()
        config = TelescopeConfig.from_json(config_json)
        if config.trainer_threads is not None:
            # Before torch is imported: it sizes its thread pools once.
            os.environ["OMP_NUM_THREADS"] = str(config.trainer_threads)
        from telescope.record.logging import setup_logging

        setup_logging(Path(run_dir), f"trainer-{rank}", None, debug=config.debug)
        self._log = open_log(RunFiles(run_dir).log(f"trainer-{rank}"))  # open as long as faults may be written
        faulthandler.enable(self._log)
        ignore_sigterm()
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._listener: socket.socket | None = None
        self.trainer: Any = None
        self.sender: Any = None
        self._memory: Sampler | None = None

    def address(self, loopback: bool) -> tuple[str, int]:
        """Listens for the other ranks. Returns host and port."""
        host = own_host(loopback=loopback)
        self._listener = listen(host)
        return host, int(self._listener.getsockname()[1])

    def setup(self, master_host: str, master_port: int, loopback: bool) -> Any:
        """Connects to the other ranks and loads the model. Returns the rank's `TrainerInfo`."""
        use_interface_of(own_host(loopback=loopback))
        from telescope.trainer.worker import Trainer
        from telescope.weights.sender import WeightSender

        self.trainer = Trainer(
            self._config, self._rank, self._world_size, master_host, master_port, listener=self._listener
        )
        info = self.trainer.setup()
        self.sender = WeightSender(
            device=self.trainer.backend.device,
            cpu_staging=self._config.weight_broadcast_cpu_staging,
            pin_memory=self._config.weight_broadcast_pin_memory,
            rank=self._rank,
            track_spans=self._config.track_gpu_events,
        )
        self._memory = Sampler(
            "memory of the trainer",
            self._config.torch_memory_sample_interval_seconds,
            memory_reader(self.trainer.backend.device),
        )
        self._memory.start()
        return info

    def take_readings(self) -> ReadingBatch:
        """Returns this rank's memory readings since the last call. Empty before `setup`."""
        return add_gpus(self._memory.take() if self._memory is not None else ReadingBatch([], []))

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    def call(self, command: str, *args: Any) -> Any:
        """Calls a method by its dotted path, such as `trainer.train_step`."""
        return attrgetter(command)(self)(*args)

    def listen_for_engine(self, engine: int, num_workers: int, loopback: bool) -> Any:
        """Listens for an engine's workers. Returns the `InitInfo` that they need to connect."""
        from telescope.weights.communicator import backend_for

        config = self._config
        return self.sender.listen(
            engine,
            num_workers=num_workers,
            host=own_host(loopback=loopback),
            backend=backend_for(self.trainer.backend.device, cpu_staging=config.weight_broadcast_cpu_staging),
            timeout_seconds=config.ray_broadcast_init_timeout_s,
        )

    def send_weights(self, update: UpdateInfo, engines: list[int], fingerprints: bool, corrupt: str | None) -> Any:
        """Gathers the weights and sends them to this rank's engines."""
        import torch

        weights = self.trainer.named_weights(getattr(torch, update.dtype))
        return self.sender.send(weights, update, engines, fingerprints=fingerprints, corrupt=corrupt)

    def self_check(self, function: str, *inputs: Any) -> Any:
        """Calls a function of `trainer.self_check` with the backend."""
        from telescope.trainer import self_check

        return getattr(self_check, function)(self.trainer.backend, *inputs)

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.stop()
        if self.sender is not None:
            self.sender.close()
        if self.trainer is not None:
            self.trainer.shutdown()


def add_gpus(batch: ReadingBatch) -> ReadingBatch:
    """Adds the GPUs that Ray assigned to this actor. The caller adds its node."""
    return replace(batch, gpus=tuple(int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdigit()))


class ActorExited(InfrastructureError):
    """The process of an actor has exited."""


async def answer(reference: Any, what: str) -> Any:
    """Awaits an actor's result. Raises what the actor raised, without Ray's wrapping.

    Raises `ActorExited`, which names `what`, when the actor's process is gone, or `RunError` when that is because a Ray
    daemon exited.
    """
    try:
        return await reference
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:  # large results stay on its node
        await asyncio.sleep(DAEMON_EXIT_SECONDS)
        if failure := daemon_failure():
            raise RunError(failure) from None
        raise ActorExited(f"{what}: the actor's process is gone ({error})") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, Exception):
            raise
        if isinstance(cause, UserError | RunError):
            raise cause from None  # its message explains everything
        # Ray's text holds the traceback in the actor's process.
        raise cause from error


async def dump_stacks(kind: str, actors: Sequence[Any]) -> dict[str, str]:
    """Returns the stacks of each actor by name, such as `trainer rank 0`, or why there are none."""
    stacks: dict[str, str] = {}
    for name, call in [(f"{kind} {index}", actor.dump_stacks.remote()) for index, actor in enumerate(actors)]:
        try:
            async with asyncio.timeout(5):
                stacks[name] = await call
        except Exception as error:
            stacks[name] = f"no answer: {error!r}"
    return stacks


async def stop_actors(kind: str, actors: Sequence[Any]) -> None:
    """Lets actors stop the processes that they started. Removing their placement group ends the actors' processes."""

    async def stop(index: int, actor: Any) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await actor.stop.remote()
        except Exception as error:
            logger.warning("%s %d did not stop by itself: %r", kind, index, error)

    await asyncio.gather(*(stop(index, actor) for index, actor in enumerate(actors)))


class HostGroup:
    """One actor on each machine without the driver, by machine name. `here` is the driver's machine.

    The constructor does not wait for the actors. They reserve no resources; if one exits, only its gauges are missing.
    """

    def __init__(self, config: TelescopeConfig, cluster: Cluster) -> None:
        seconds = config.system_metrics_collection_interval_seconds
        self.here = cluster.node_names[cluster.driver_node]
        self._actors: dict[str, Any] = {}
        for node, name in cluster.node_names.items():
            if node != cluster.driver_node:
                placement = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
                self._actors[name] = make_actor(MachineSampler, placement).remote(seconds)

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    async def take_readings(self, name: str) -> ReadingBatch:
        """Returns a machine's readings since the last call."""
        batch: ReadingBatch = await answer(self._actors[name].take.remote(), f"gauges of machine {name}")
        return replace(batch, node=name)

    async def stop(self) -> None:
        """Stops the actors."""
        for actor in self._actors.values():
            await asyncio.to_thread(ray.kill, actor)
