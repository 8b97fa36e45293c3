"""A sender in this process and processes that stand in for engine workers, on CPU or GPU."""

import os
import time
from multiprocessing.connection import Connection

import torch
from tests.integration.trainer.trainer_cases import fork_server

from telescope.weights.communicator import Backend, Communicator
from telescope.weights.control_channel import TransferError
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import InitInfo, TensorMeta, UpdateInfo, make_update, to_hex
from telescope.weights.receiver import NamedTensors, receive
from telescope.weights.sender import WeightSender

CONNECT_SECONDS = 300.0


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (700, 300), "a.weight": (300, 301), "a.bias": (300,), "norm.weight": (300,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def update_of(tensors: dict[str, torch.Tensor], *, exact: str = "", **options: object) -> UpdateInfo:
    metas = [TensorMeta(name, tuple(t.shape), exact=name == exact) for name, t in tensors.items()]
    fields = {"version": 1, "dtype": "float32", "bucket_mb": 1, "timeout_seconds": 20.0, **options}
    return make_update(metas, **fields)  # type: ignore[arg-type]


def expected(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, str]:
    return {name: to_hex(fingerprint(t.to(dtype))) for name, t in tensors.items()}


class Peers:
    """Processes that stand in for the workers of one engine."""

    def __init__(self, init: InitInfo, updates: list[UpdateInfo], fault: str, devices: list[str]) -> None:
        self.num_updates = len(updates)
        self.processes = []
        self.answers_of_ranks: list[Connection] = []
        for rank, device in enumerate(devices, start=1):
            mine, theirs = fork_server().Pipe()
            process = fork_server().Process(target=run_peer, args=(init, rank, updates, fault, device, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.answers_of_ranks.append(mine)

    def answers(self) -> list[dict[str, object]]:
        """One mapping per sync and rank, rank by rank; the last of a rank is its error, if it had one."""
        answers: list[dict[str, object]] = []
        for connection in self.answers_of_ranks:
            for _ in range(self.num_updates):
                answers.append(connection.recv())
                if "error" in answers[-1]:
                    break
        return answers

    def stop(self) -> None:
        for process, connection in zip(self.processes, self.answers_of_ranks, strict=True):
            process.kill()
            process.join()
            connection.close()


def run_peer(
    info: InitInfo, rank: int, updates: list[UpdateInfo], fault: str, device: str, answers: Connection
) -> None:
    """Receives the updates into a dict, or fails as `fault` says. Sends one mapping per update."""
    communicator = Communicator.connect(info, rank, torch.device(device))
    for update in updates:
        loaded: dict[str, str] = {}

        def load(tensors: NamedTensors, loaded: dict[str, str] = loaded) -> None:
            loaded.update({name: to_hex(fingerprint(tensor)) for name, tensor in tensors})
            if fault == "die":
                os._exit(9)
            if fault == "hang":
                time.sleep(600)
            if fault == "raise":
                raise ValueError("this layer does not fit")

        if fault == "die before":
            os._exit(9)
        if fault == "hang before":
            time.sleep(600)
        try:
            receive(communicator, update, load, device=torch.device(device))
        except (TransferError, ValueError) as error:
            answers.send({"rank": rank, "error": str(error)})
            break
        answers.send({"rank": rank, "loaded": loaded})
    while communicator.failure is None:  # the sender closes first, as a trainer does
        time.sleep(0.05)
    communicator.close()


class Engines:
    """Starts peers and connects a sender to them."""

    def __init__(self, *, device: str = "cpu", cpu_staging: bool = False) -> None:
        self.sender = WeightSender(device=device, cpu_staging=cpu_staging)
        self.backend: Backend = "nccl" if device.startswith("cuda") and not cpu_staging else "gloo"
        self.peers: list[Peers] = []

    def start(
        self, engine: int, updates: list[UpdateInfo], *, devices: tuple[str, ...] = ("cpu",), fault: str = ""
    ) -> Peers:
        init = self.sender.listen(
            engine, num_workers=len(devices), host="127.0.0.1", backend=self.backend, timeout_seconds=CONNECT_SECONDS
        )
        peers = Peers(init, updates, fault, list(devices))
        self.peers.append(peers)
        self.sender.connect(engine)
        return peers

    def close(self) -> None:
        self.sender.close()
        for peers in self.peers:
            peers.stop()
