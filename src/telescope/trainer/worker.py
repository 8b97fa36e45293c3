"""One rank of the trainer, as the cluster drives it: a plain class that an actor wraps.

Owns the process: threads, device, the process group, what Python's cycle collector visits, and the time between steps.
The work itself is the backend's.
Invariants: every method but `setup` needs `setup` first, and is called on all ranks in the same order; a wait for other
ranks ends after `COLLECTIVE_TIMEOUT` with an error in every rank that is still alive.

The row that the trainer compiles with before there is any data.

Owns its shape: as long as the longest rows of a run, so that the kernels and the memory of a step are met, and of
several segments. What it holds has no meaning.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from telescope.config.memory import trainer_share
from telescope.errors import ConfigError
from telescope.trainer.backends import TrainingBackend, find_backend
from telescope.trainer.batch import MicroBatch, Span, StepInput, StepResult, TrainSample
from telescope.trainer.metrics import reduce_max
from telescope.trainer.packing import lay_out
from telescope.utils.process import leave_out_nothing, leave_out_what_exists
from telescope.weights.plan import TensorMeta

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""How long a rank waits for the others inside one collective: longer than any load from a slow disk."""


@dataclass(slots=True, frozen=True)
class TrainerInfo:
    """What a rank says of itself once it is ready."""

    num_parameters: int
    device: str
    dtype: str
    """The dtype that weights are kept in."""
    config_hash: str
    pid: int
    host: str
    compiles: bool
    """Whether `warm_up` has something to do."""


class Trainer:
    """One rank. `config` is a `TelescopeConfig`, the same object on every rank.

    The ranks meet at `master_addr:master_port`, where rank 0 listens, there and on no other interface: on `door`, a
    socket that listens already, or on one of its own.
    """

    def __init__(
        self,
        config: Any,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        *,
        door: socket.socket | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._meeting_place = master_addr, master_port
        self._door = door
        self._is_loopback = master_addr.startswith("127.") or master_addr in ("localhost", "::1")
        self._backend: TrainingBackend | None = None
        self._idle_since = 0.0
        self._sync_seconds = 0.0
        self._sync_spans: list[Span] = []

    @property
    def backend(self) -> TrainingBackend:
        """The backend. Raises `RuntimeError` before `setup`."""
        if self._backend is None:
            raise RuntimeError(f"trainer rank {self.rank} is not set up")
        return self._backend

    def setup(self) -> TrainerInfo:
        """Join the other ranks, load the model. Raises `UserError` for what a person can mend. Collective."""
        config = self.config
        device = choose_device(config.device, self.rank)
        if config.trainer_threads is not None:
            torch.set_num_threads(config.trainer_threads)
        if self._is_loopback:
            # All ranks are on this host; gloo would otherwise listen on whatever the host's name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.manual_seed(config.seed)
        transformers_logging.disable_progress_bar()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            if config.share_gpus:
                memory = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(trainer_share(config, memory) / memory, device)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self._open_store(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        backend = find_backend(config.train_backend)(config, self.rank, self.world_size, device)
        backend.init()
        self._backend = backend
        leave_out_what_exists()
        self._idle_since = time.time()
        return TrainerInfo(
            num_parameters=backend.num_parameters,
            device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
            dtype=config.model_dtype,
            config_hash=config.hash,
            pid=os.getpid(),
            host=socket.gethostname(),
            compiles=backend.compiles,
        )

    def _open_store(self) -> dist.TCPStore:
        """The store through which the ranks find each other; waits for rank 0."""
        host, port = self._meeting_place
        descriptor = None
        if self.rank == 0:
            # By itself the store would listen on every interface; it takes over a socket that it is given.
            door = self._door or socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
            port = door.getsockname()[1]
            descriptor = door.detach()
        return dist.TCPStore(
            host,
            port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    def warm_up(self) -> Span:
        """Compile before the first step what it would compile. Returns when that was. Collective."""
        started = time.time()
        self.backend.warm_up()
        ended = time.time()
        leave_out_what_exists()
        self._idle_since = time.time()
        return Span("compile", started, ended, self.rank)

    def restart(self) -> None:
        """Start over from the weights that the config names, with a fresh optimizer. Collective."""
        leave_out_nothing()  # what this replaces may lie in cycles
        self.backend.init()
        leave_out_what_exists()
        self._idle_since = time.time()

    def train_step(self, step_input: StepInput) -> StepResult:
        """One training step of this rank. Collective.

        Adds to the backend's metrics `timing_step_active`, `timing_waiting_for_data` (idle since the last step or
        sync), `timing_weight_sync_trainer_total` (the last sync's gathering) and their sum, `timing_step_total`.
        """
        backend = self.backend
        started = time.time()
        data = {"step": step_input.step, "version": step_input.version, "minibatches": step_input.minibatches}
        metrics = backend.train_step(data)
        ended = time.time()
        timing = {
            "timing_step_active": ended - started,
            "timing_waiting_for_data": max(0.0, started - self._idle_since),
            "timing_weight_sync_trainer_total": self._sync_seconds,
        }
        timing["timing_step_total"] = sum(timing.values())
        metrics |= reduce_max(timing, torch.device("cpu"))
        spans = [
            *self._sync_spans,
            Span("waiting_for_data", min(self._idle_since, started), started, self.rank),
            Span("step", started, ended, self.rank),
            *backend.take_spans(),
        ]
        self._sync_seconds, self._sync_spans = 0.0, []
        self._idle_since = time.time()
        return StepResult(metrics=metrics, spans=spans)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) one at a time, on every rank. Collective; take all of them on all ranks.
        In `dtype`, by default the one that the trainer keeps them in.

        From the first tensor asked for to the last one handled counts as weight sync.
        """
        started = time.time()
        yield from self.backend.named_weights(dtype)
        ended = time.time()
        self._sync_seconds += ended - started
        self._sync_spans.append(Span("weight_sync", started, ended, self.rank))
        self._idle_since = ended

    def weight_metadata(self) -> list[TensorMeta]:
        """Names, shapes and dtypes of what `named_weights` yields, in its order. No communication."""
        return self.backend.weight_metadata()

    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token but the first: len(token_ids) - 1 numbers. Collective."""
        return self.backend.sequence_logprobs(token_ids, temperature)

    def save_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face checkpoint. Collective; rank 0 writes."""
        self.backend.save_hf(Path(directory))

    def save_checkpoint(self, step: int, directory: str | Path) -> None:
        """Write weights and optimizer state. Collective."""
        self.backend.save_checkpoint(step, Path(directory))

    def load_checkpoint(self, step: int, directory: str | Path) -> None:
        """Continue from a checkpoint. Collective."""
        self.backend.load_checkpoint(step, Path(directory))

    def shutdown(self) -> None:
        """Leave the process group. Calling it again changes nothing."""
        self._backend = None
        leave_out_nothing()
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(wanted: str, rank: int) -> torch.device:
    """`auto`: a GPU if there is one. Raises `ConfigError` when `cuda` is wanted and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' is set, but torch sees no GPU here: set device to 'auto' or 'cpu'")
    # A Ray actor sees its own GPU only; without Ray, ranks of a host share the list.
    return torch.device("cuda", rank % torch.cuda.device_count())


NUM_SHORT = 3
"""Segments of a sixth of the row; one more has the rest."""
MIN_TOKENS = 12
"""Two tokens for each short segment and more for the long one, for the shortest `seq_len`."""


def warm_up_row(seq_len: int, pad_to_multiple_of: int, vocab_size: int) -> MicroBatch:
    """A row as long as those that are packed can be, of which all tokens are predicted that can be."""
    total = max(seq_len // pad_to_multiple_of * pad_to_multiple_of, MIN_TOKENS)
    short = total // 6
    return lay_out([_sample(size, vocab_size) for size in (total - NUM_SHORT * short, *[short] * NUM_SHORT)])


def _sample(length: int, vocab_size: int) -> TrainSample:
    trained_L = np.ones(length, dtype=bool)
    trained_L[0] = False
    return TrainSample(
        sample_id="warm-up",
        group_id=0,
        environment="warm-up",
        # Many tokens, so that a mixture of experts uses many of them.
        token_ids_L=np.arange(length) % vocab_size,
        trained_L=trained_L,
        engine_logprob_L=np.zeros(length),
        version_L=np.zeros(length, dtype=np.int32),
        reward=0.0,
    )
