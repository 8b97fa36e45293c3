"""A sender in this process and peer processes that play engine workers, on CPU or GPU."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from telescope.weights.communicator import Backend
from telescope.weights.fingerprint import fingerprint, to_hex
from telescope.weights.plan import InitInfo, TensorMeta, UpdateInfo, make_update
from telescope.weights.sender import WeightSender

PEER = Path(__file__).with_name("transfer_peer.py")
CONNECT_SECONDS = 60.0


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (700, 300), "a.weight": (300, 301), "a.bias": (300,), "norm.weight": (300,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def update_of(tensors: dict[str, torch.Tensor], **options: object) -> UpdateInfo:
    metas = [TensorMeta(name, tuple(t.shape)) for name, t in tensors.items()]
    fields = {"version": 1, "dtype": "float32", "bucket_mb": 1, "timeout_seconds": 20.0, **options}
    return make_update(metas, **fields)  # type: ignore[arg-type]


def expected(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, str]:
    return {name: to_hex(fingerprint(t.to(dtype))) for name, t in tensors.items()}


class Peers:
    """Peer processes of one engine."""

    def __init__(self, init: InitInfo, updates: list[UpdateInfo], fault: str, devices: list[str]) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.num_updates = len(updates)
        for rank, device in enumerate(devices, start=1):
            order = {
                "init": init.to_dict(),
                "rank": rank,
                "updates": [update.to_dict() for update in updates],
                "fault": fault,
                "device": device,
            }
            command = [sys.executable, str(PEER), json.dumps(order)]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def answers(self) -> list[dict[str, object]]:
        """One mapping per sync and rank, rank by rank; the last of a rank is its error, if it had one."""
        answers: list[dict[str, object]] = []
        for process in self.processes:
            assert process.stdout is not None
            for _ in range(self.num_updates):
                answers.append(json.loads(process.stdout.readline()))
                if "error" in answers[-1]:
                    break
        return answers

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


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
            engine,
            num_workers=len(devices),
            host="127.0.0.1",
            backend=self.backend,
            timeout_seconds=CONNECT_SECONDS,
        )
        peers = Peers(init, updates, fault, list(devices))
        self.peers.append(peers)
        self.sender.connect(engine)
        return peers

    def close(self) -> None:
        self.sender.close()
        for peers in self.peers:
            peers.stop()
