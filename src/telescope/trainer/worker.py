"""Defines one rank of the trainer, which a Ray actor wraps.

Owns the process: threads, device, process group, Python's garbage collection, and the time between steps. The backend
does the work.

Invariants: every method except `setup` requires `setup`, and is called on all ranks in the same order. A wait for other
ranks ends after `COLLECTIVE_TIMEOUT` with an error in every rank that still runs.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers.utils import logging as transformers_logging

from telescope.config.memory import trainer_share
from telescope.errors import ConfigError
from telescope.trainer.backends import TrainingBackend, find_backend
from telescope.trainer.batch import COLLECTIVE_TIMEOUT, StepInput, StepResult, TrainerInfo
from telescope.trainer.metrics import reduce_max
from telescope.utils.digests import digests_of
from telescope.utils.process import freeze_heap, unfreeze_heap
from telescope.utils.timeline import Span
from telescope.weights.model_folder import ModelOrigin, read_origin, write_origin

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Trainer:
    """One rank. `config` is a `TelescopeConfig`, the same object on every rank.

    Rank 0 listens at `master_addr:master_port` and on no other interface, with the open socket `listener` if given. The
    other ranks connect to it.
    """

    config: Any
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    _: KW_ONLY
    listener: socket.socket | None = None

    def __post_init__(self) -> None:
        self._idle_since = 0.0
        self._spans_between: list[Span] = []
        """Spans of weight syncs and checkpoints since the last step."""
        self._left_out: set[str] = set()
        """Metrics of a user's backend that are no numbers."""

    def setup(self) -> TrainerInfo:
        """Connects to the other ranks and loads the model. Raises `UserError` for invalid settings. Collective."""
        config = self.config
        device = choose_device(config.device, self.rank)
        if config.trainer_threads is not None:
            torch.set_num_threads(config.trainer_threads)
        if self.master_addr.startswith("127.") or self.master_addr in ("localhost", "::1"):
            # All ranks are on this host. By default gloo listens on the address of the host's name.
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
            store=(store := self._open_store()),
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        backend = find_backend(config.train_backend)(config, self.rank, self.world_size, device)
        backend.store_address = store.host, store.port
        backend.init()
        self.backend: TrainingBackend = backend
        freeze_heap()
        self._idle_since = time.time()
        return TrainerInfo(
            device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
            config_hash=config.hash,
            compiles=backend.compiles,
            layout=backend.layout,
        )

    def _open_store(self) -> dist.TCPStore:
        """Opens the store with which the ranks find each other. Waits for rank 0."""
        host, port = self.master_addr, self.master_port
        descriptor = None
        if self.rank == 0:
            # By default the store listens on every interface. It takes over a given socket.
            listener = self.listener or socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
            port = listener.getsockname()[1]
            descriptor = listener.detach()
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
        """Compiles what the first step would compile. Returns its span. Collective."""
        started = time.time()
        self.backend.warm_up()
        ended = time.time()
        freeze_heap()
        self._idle_since = time.time()
        return Span("compile", started, ended, self.rank)

    def restart(self) -> None:
        """Reloads the weights of the config, with a new optimizer. Collective."""
        unfreeze_heap()  # the replaced objects may be in reference cycles
        self.backend.init()
        freeze_heap()
        self._idle_since = time.time()

    def train_step(self, step_input: StepInput) -> StepResult:
        """Runs one training step of this rank. Collective.

        To the backend's metrics, adds `timing_step_active`, `timing_waiting_for_data` (idle since the last step, sync
        or checkpoint), `timing_weight_sync_trainer_total` (the last sync's gathering), `timing_checkpoint` (the copy of
        a checkpoint after the last step) and their sum, `timing_step_total`.
        """
        backend = self.backend
        started = time.time()
        names = ("step", "version", "minibatches", "recorded")
        metrics = self._numbers(backend.train_step({name: getattr(step_input, name) for name in names}))
        ended = time.time()
        between = self._spans_between
        timing = {
            "timing_step_active": ended - started,
            "timing_waiting_for_data": max(0.0, started - self._idle_since),
            "timing_weight_sync_trainer_total": sum(s.end - s.start for s in between if s.name == "weight_sync"),
            "timing_checkpoint": sum(s.end - s.start for s in between if s.name == "checkpoint"),
        }
        timing["timing_step_total"] = sum(timing.values())
        metrics |= reduce_max(timing, torch.device("cpu"))
        spans = [
            *between,
            Span("waiting_for_data", min(self._idle_since, started), started, self.rank),
            Span("step", started, ended, self.rank),
            *backend.take_spans(),
        ]
        self._spans_between = []
        self._idle_since = time.time()
        return StepResult(metrics=metrics, spans=spans, tokens=backend.take_tokens())

    def _numbers(self, metrics: Any) -> dict[str, float]:
        """Converts metrics, also tensors, to floats. Leaves out what is no number, with one warning for each name."""
        if not isinstance(metrics, Mapping):
            raise TypeError(f"train_step of {type(self.backend).__name__} returned {metrics!r:.80}, no dict of metrics")
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                if name not in self._left_out:
                    logger.warning("train_step returned %.80r for %s, which is left out: no number", value, name)
                self._left_out.add(name)
        return numbers

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, full tensor) on every rank, in `dtype` or the stored dtype.

        Collective: drain it. The time from the first request to the end counts as weight sync.
        """
        with self._between_steps("weight_sync"):
            yield from self.backend.named_weights(dtype)

    def sync_adapter(self, directory: Path, dtype: str) -> int:
        """Writes the adapters with `TrainingBackend.save_adapter`. Its time counts as weight sync. Collective."""
        with self._between_steps("weight_sync"):
            return self.backend.save_adapter(directory, getattr(torch, dtype))

    def save_hf(self, directory: Path, origin: ModelOrigin) -> None:
        """Writes the model and its `origin` with `TrainingBackend.save_hf`. Collective."""
        self.backend.origin = origin
        self.backend.save_hf(directory)
        if self.rank == 0 and directory.is_dir():
            found = read_origin(directory)
            if found is None or replace(origin, weights=found.weights, files=found.files) != found:
                write_origin(directory, origin)  # a user's backend may have its own `save_hf`

    @contextmanager
    def _between_steps(self, name: str) -> Iterator[None]:
        """Records the block as a span, in which this rank does not wait for data."""
        started = time.time()
        try:
            yield
        finally:
            self._idle_since = time.time()
            self._spans_between.append(Span(name, started, self._idle_since, self.rank))

    def save_checkpoint(self, step: int, directory: Path) -> None:
        """Copies this rank's state, which is then written to `directory`. Raises `OSError`. Collective."""
        self._saving = directory
        with self._between_steps("checkpoint"):
            self.backend.save_checkpoint(step, directory)

    def finish_checkpoint(self) -> dict[str, str]:
        """Waits until this rank's files are written. Returns their digests. Called while the rank trains on."""
        self.backend.finish_checkpoint()
        return digests_of(self._saving, (path.name for path in self._saving.glob(f"__{self.rank}_*.distcp")))

    def shutdown(self) -> None:
        """Closes the backend and leaves the process group. Idempotent."""
        if "backend" in vars(self):
            self.backend.close()
            del self.backend
        unfreeze_heap()
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(wanted: str, rank: int) -> torch.device:
    """Returns the device of a rank. `auto` prefers a GPU. Raises `ConfigError` for `cuda` without a GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' is set, but torch finds no GPU: set device to 'auto' or 'cpu'")
    # A Ray actor lists only its own GPU. Without Ray, all ranks of a host list the same GPUs.
    return torch.device("cuda", rank % torch.cuda.device_count())
