"""The Ray actors of a run: one per inference server, one per trainer rank.

They are thin: an actor unpacks the config it was handed (never one from disk), makes the plain class of the room it
stands for, and forwards calls. Each can say the hash of its config and dump its stacks, and ends what it started.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import ray

from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError
from telescope.stacks import thread_stacks
from telescope.weights.lifeline import listen
from telescope.weights.plan import UpdateInfo

ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 4}}
"""Actors are never restarted behind the run's back: their state is weights and processes. Calls in the `control` group
are answered while the actor is at work."""


def make_actor(actor_class: type, placement: dict[str, Any]) -> Any:
    """The remote form of one of the classes below; `.remote(...)` starts it where `placement` says."""
    options: dict[str, Any] = {**ACTOR_OPTIONS, **placement}
    return ray.remote(**options)(actor_class)


class InferenceActor:
    """Supervises one vLLM process through `inference.server.InferenceServer`."""

    def __init__(
        self, config_json: str, index: int, host: str, port: int, secret: str, model: str, run_dir: str
    ) -> None:
        from telescope.inference.server import InferenceServer

        config = TelescopeConfig.from_json(config_json)
        self._server = InferenceServer(config, index, port, host, secret, model, Path(run_dir))

    def start(self) -> Any:
        """Start the process and wait until it answers. Returns its `ServerInfo`."""
        return self._server.start()

    @ray.method(concurrency_group="control")
    def status(self) -> Any:
        return self._server.status()

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the vLLM process and all its children."""
        self._server.stop()


class TrainerActor:
    """One trainer rank, with the sender of its weights."""

    def __init__(self, config_json: str, rank: int, world_size: int, run_dir: str) -> None:
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

    @ray.method(concurrency_group="control")
    def address(self, loopback: bool) -> tuple[str, int]:
        """Where the ranks can meet this one: its host, and a port that it listens on from now on."""
        host = _own_host(loopback)
        self._door = listen(host)
        return host, int(self._door.getsockname()[1])

    def setup(self, master_host: str, master_port: int) -> Any:
        """Join the other ranks and load the model. Returns its `TrainerInfo`."""
        from telescope.trainer.worker import Trainer
        from telescope.weights.sender import WeightSender

        self._trainer = Trainer(self._config, self._rank, self._world_size, master_host, master_port, door=self._door)
        info = self._trainer.setup()
        self._sender = WeightSender(
            device=self._trainer.backend.device,
            cpu_staging=self._config.weight_broadcast_cpu_staging,
            pin_memory=self._config.weight_broadcast_pin_memory,
        )
        return info

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
            host=_own_host(loopback),
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

    def send_weights(self, update: UpdateInfo, engines: list[int], fingerprints: bool, spoil: str | None = None) -> Any:
        """Gather the weights with the other ranks and send them to those of `engines` that this rank serves."""
        weights = self._trainer.named_weights()
        return self._sender.send(weights, update, engines, fingerprints=fingerprints, spoil=spoil)

    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        return list(self._trainer.sequence_logprobs(token_ids, temperature))

    def packed_logprobs(self, step_input: Any) -> Any:
        """See `trainer.proofs`."""
        from telescope.trainer.proofs import packed_logprobs

        return packed_logprobs(self._trainer.backend, step_input)

    def compare_gradients(self, first: Any, second: Any) -> Any:
        """See `trainer.proofs`."""
        from telescope.trainer.proofs import compare_gradients

        return compare_gradients(self._trainer.backend, first, second)

    def save_hf(self, directory: str) -> None:
        self._trainer.save_hf(Path(directory))

    @ray.method(concurrency_group="control")
    def dump_stacks(self) -> str:
        return thread_stacks()

    def stop(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._trainer is not None:
            self._trainer.shutdown()


def _own_host(loopback: bool) -> str:
    return "127.0.0.1" if loopback else str(ray.util.get_node_ip_address())


async def answer(reference: Any, what: str) -> Any:
    """Await an actor's answer; an actor that is gone is an `InfrastructureError` that says what was asked of it."""
    try:
        return await reference
    except ray.exceptions.RayActorError as error:
        raise InfrastructureError(f"{what}: the actor's process is gone ({error})") from error
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
