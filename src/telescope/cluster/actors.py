"""The Ray actors of a run: one per inference server, one per trainer rank, one per machine without the driver.

They are thin: an actor unpacks the config it was handed (never one from disk), makes the plain class of the room it
stands for, and forwards calls. Each can say the hash of its config and dump its stacks, and ends what it started.

The machines of the cluster that the driver does not run on: an actor on each, which reads its gauges.

Such an actor takes no share of its machine. One that does not come up, or dies, costs the gauges of that machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope.cluster.network import own_host, use_interface_of
from telescope.cluster.ray_cluster import Cluster, own_address
from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError, RunError, UserError
from telescope.inference.engine_metrics import metrics_reader
from telescope.inference.vllm.request_tracing import TraceTarget
from telescope.record.gauges import ReadingBatch, Sampler
from telescope.record.system_metrics import MachineSampler
from telescope.utils.process import thread_stacks
from telescope.weights.control_channel import listen
from telescope.weights.plan import UpdateInfo

ACTOR_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 4, "observe": 1},
}
"""Actors are never restarted behind the run's back: their state is weights and processes. Calls in the other groups are
answered while the actor is at work; those of `observe` also while calls of `control` wait for engines."""


def make_actor(actor_class: type, placement: dict[str, Any]) -> Any:
    """The remote form of one of the classes below; `.remote(...)` starts it where `placement` says."""
    options: dict[str, Any] = {**ACTOR_OPTIONS, **placement}
    return ray.remote(**options)(actor_class)


def end_at_once_on_sigterm() -> None:
    """Called in the main thread of an actor, whose process Ray ends with SIGTERM when its placement group goes.

    Ray's own handler raises SystemExit wherever that thread happens to be, and in a destructor Python prints it with a
    traceback and goes on. There is nothing to wait for: `stop` has been called, and children watch for this end.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))


class InferenceActor:
    """Supervises one vLLM process through `inference.server.InferenceServer`."""

    def __init__(
        self,
        config_json: str,
        index: int,
        host: str,
        port: int,
        secret: str,
        model: str,
        run_dir: str,
        traces: TraceTarget | None,
        broadcast_on_loopback: bool,
    ) -> None:
        from telescope.inference.server import InferenceServer

        end_at_once_on_sigterm()
        config = TelescopeConfig.from_json(config_json)
        # In the environment that vLLM and its workers inherit, whose NCCL meets the trainer's.
        use_interface_of(own_host(loopback=broadcast_on_loopback))
        self._server = InferenceServer(
            config, index, port, host, secret, model, Path(run_dir), traces=traces, node_address=own_address()
        )
        self._metrics = Sampler(
            "engine metrics",
            config.system_metrics_collection_interval_seconds,
            metrics_reader(self._server.metrics_text),
        )

    def start(self) -> Any:
        """Start the process and wait until it answers. Returns its `ServerInfo`."""
        info = self._server.start()
        self._metrics.start()
        return info

    @ray.method(concurrency_group="observe")
    def take_readings(self) -> ReadingBatch:
        """What the server has reported of itself since the last call."""
        return placed(self._metrics.take())

    @ray.method(concurrency_group="control")
    def status(self) -> Any:
        return self._server.status()

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the vLLM process and all its children."""
        self._metrics.stop()
        self._server.stop()


class TrainerActor:
    """One trainer rank, with the sender of its weights."""

    def __init__(self, config_json: str, rank: int, world_size: int, run_dir: str) -> None:
        end_at_once_on_sigterm()
        config = TelescopeConfig.from_json(config_json)
        if config.trainer_threads is not None:
            # Before torch is imported: it sizes its thread pools once.
            os.environ["OMP_NUM_THREADS"] = str(config.trainer_threads)
        from telescope.record.logging import setup_logging

        setup_logging(Path(run_dir), f"trainer-{rank}", None)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._door: socket.socket | None = None
        self._trainer: Any = None
        self._sender: Any = None
        self._memory: Sampler | None = None

    @ray.method(concurrency_group="control")
    def address(self, loopback: bool) -> tuple[str, int]:
        """Where the ranks can meet this one: its host, and a port that it listens on from now on."""
        host = own_host(loopback=loopback)
        self._door = listen(host)
        return host, int(self._door.getsockname()[1])

    def setup(self, master_host: str, master_port: int, loopback: bool) -> Any:
        """Join the other ranks and load the model. Returns its `TrainerInfo`."""
        use_interface_of(own_host(loopback=loopback))
        from telescope.trainer.timeline import memory_reader
        from telescope.trainer.worker import Trainer
        from telescope.weights.sender import WeightSender

        self._trainer = Trainer(self._config, self._rank, self._world_size, master_host, master_port, door=self._door)
        info = self._trainer.setup()
        self._sender = WeightSender(
            device=self._trainer.backend.device,
            cpu_staging=self._config.weight_broadcast_cpu_staging,
            pin_memory=self._config.weight_broadcast_pin_memory,
            rank=self._rank,
            track_spans=self._config.track_gpu_events,
        )
        self._memory = Sampler(
            "memory of the trainer",
            self._config.torch_memory_sample_interval_seconds,
            memory_reader(self._trainer.backend.device),
        )
        self._memory.start()
        return info

    def warm_up(self) -> Any:
        """Compile what the first training step would. Returns the `Span` that it took."""
        return self._trainer.warm_up()

    @ray.method(concurrency_group="observe")
    def take_readings(self) -> ReadingBatch:
        """What this rank's memory was since the last call; nothing before `setup`."""
        return placed(self._memory.take() if self._memory is not None else ReadingBatch([], []))

    def train_step(self, step_input: Any) -> Any:
        return self._trainer.train_step(step_input)

    def restart(self) -> None:
        self._trainer.restart()

    def weight_metadata(self) -> Any:
        return self._trainer.weight_metadata()

    @ray.method(concurrency_group="control")
    def listen_for_engine(self, engine: int, num_workers: int, loopback: bool) -> Any:
        """Open the door for an engine's workers. Returns the `InitInfo` that they must be told."""
        from telescope.weights.communicator import backend_for

        config = self._config
        return self._sender.listen(
            engine,
            num_workers=num_workers,
            host=own_host(loopback=loopback),
            backend=backend_for(self._trainer.backend.device, cpu_staging=config.weight_broadcast_cpu_staging),
            timeout_seconds=config.ray_broadcast_init_timeout_s,
        )

    @ray.method(concurrency_group="control")
    def connect_engine(self, engine: int) -> None:
        """Wait until the announced engine's workers have joined."""
        self._sender.connect(engine)

    @ray.method(concurrency_group="control")
    def abort_engine(self, engine: int, reason: str) -> None:
        """Break off the transfer to one engine; a send that is blocked on it goes on with the others."""
        self._sender.abort(engine, reason)

    def send_weights(
        self, update: UpdateInfo, engines: list[int], fingerprints: bool, corrupt: str | None = None
    ) -> Any:
        """Gather the weights with the other ranks and send them to those of `engines` that this rank serves."""
        import torch

        weights = self._trainer.named_weights(getattr(torch, update.dtype))
        return self._sender.send(weights, update, engines, fingerprints=fingerprints, corrupt=corrupt)

    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        return list(self._trainer.sequence_logprobs(token_ids, temperature))

    def packed_logprobs(self, step_input: Any) -> Any:
        """See `trainer.proofs`."""
        from telescope.trainer.self_check import packed_logprobs

        return packed_logprobs(self._trainer.backend, step_input)

    def compare_gradients(self, first: Any, second: Any) -> Any:
        """See `trainer.proofs`."""
        from telescope.trainer.self_check import compare_gradients

        return compare_gradients(self._trainer.backend, first, second)

    def save_hf(self, directory: str) -> None:
        self._trainer.save_hf(Path(directory))

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    def stop(self) -> None:
        if self._memory is not None:
            self._memory.stop()
        if self._sender is not None:
            self._sender.close()
        if self._trainer is not None:
            self._trainer.shutdown()


class HostActor:
    """Samples the gauges of a machine that the driver does not run on."""

    def __init__(self, interval: float) -> None:
        self._machine = MachineSampler(interval)

    def take_readings(self) -> ReadingBatch:
        """What was read since the last call."""
        return self._machine.take()


def placed(taken: ReadingBatch) -> ReadingBatch:
    """The same, with the GPUs that Ray gave to this actor; its node is known to who placed it."""
    return replace(taken, gpus=tuple(int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdigit()))


async def answer(reference: Any, what: str) -> Any:
    """Await an actor's answer. What the actor raised is raised here as it was, without Ray's wrapping of it.

    An actor that is gone is an `InfrastructureError` that says what was asked of it.
    """
    try:
        return await reference
    except ray.exceptions.RayActorError as error:
        raise InfrastructureError(f"{what}: the actor's process is gone ({error})") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, Exception):
            raise
        if isinstance(cause, UserError | RunError):
            raise cause from None  # its message is the whole explanation
        # Ray's text is the traceback in the actor's process: it stays, as where this came from.
        raise cause from error


class HostGroup:
    """The actors, by the names of their machines. Making it waits for none of them. `here` is the driver's."""

    def __init__(self, config: TelescopeConfig, cluster: Cluster) -> None:
        seconds = config.system_metrics_collection_interval_seconds
        self.here = cluster.node_names[cluster.driver_node]
        self._actors: dict[str, Any] = {}
        for node, name in cluster.node_names.items():
            if node != cluster.driver_node:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = make_actor(HostActor, {"num_cpus": 0, "scheduling_strategy": there})
                self._actors[name] = actor.remote(seconds)

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    async def take_readings(self, name: str) -> ReadingBatch:
        """What was read of a machine since the last call."""
        batch: ReadingBatch = await answer(self._actors[name].take_readings.remote(), f"gauges of machine {name}")
        return replace(batch, node=name)

    async def stop(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            await asyncio.to_thread(ray.kill, actor)
