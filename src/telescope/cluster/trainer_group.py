"""Driver-side proxy for the trainer ranks. Runs one collective command at a time.

Rank commands are collectives: every rank must run the same ones in the same order. The caller of a command locks
`queue`: `train_step` by itself, a weight sync from its first command to its last. Between two training steps a single
server can receive weights. `version` counts the steps that the ranks' weights contain and changes only under the lock.
Each command has a deadline and a name. When a rank's process or node is lost, `RankLost` names the rank, the signal and
the last lines of its log, `watch` raises it too, and `replace` restarts all ranks in the same places.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from telescope.cluster.actors import ActorExited, TrainerActor, answer, dump_stacks, make_actor, stop_actors
from telescope.cluster.placement import Placement
from telescope.cluster.ray_cluster import Cluster
from telescope.config import TelescopeConfig
from telescope.config.memory import less_trainer_memory
from telescope.errors import DeadlineExceeded, RankLost, RunError, UserError
from telescope.record.files import RunFiles
from telescope.record.gauges import ReadingBatch
from telescope.trainer.batch import Layout, StepInput, StepResult, check_layouts
from telescope.utils.process import log_size, log_tail
from telescope.utils.timeline import Span
from telescope.weights.plan import InitInfo, SendReport, TensorMeta, UpdateInfo

if TYPE_CHECKING:
    import numpy as np

    from telescope.trainer.self_check import GradientComparison
    from telescope.weights.model_folder import ModelOrigin

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_SECONDS = 1800.0
"""Loading a large model from a slow disk; compiling its blocks on a slow CPU."""

CHECKPOINT_TIMEOUT_SECONDS = 3600.0
"""Hundreds of gigabytes on a slow network drive."""

RANK_EXIT_SECONDS = 2.0
"""When a command fails on one rank because another has exited, Ray reports the exit within this time."""

NODE_LOSS_SECONDS = 60.0
"""When a collective fails because the node of another rank is lost, Ray reports the loss within this time."""

COLLECTIVE_ERRORS = re.compile(
    r"gloo|nccl|Dist(Backend|Network|Store)Error|Connection (closed|reset) by", re.IGNORECASE
)
"""Errors of a rank whose peer has exited."""

OUT_OF_GPU_MEMORY = re.compile(r"CUDA.*out of memory|Failed to CUDA \w*alloc|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Errors of kernels, NCCL and cuBLAS, which have no type for it."""

LOG_TAIL_BYTES = 3000
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that Python's fault handler writes to the log."""


def _is_out_of_gpu_memory(error: Exception) -> bool:
    if isinstance(error, RunError):
        return False
    # By its name, since the driver does not import torch. Ray's error of the same name means memory of the host.
    is_named = repr(type(error)) == "<class 'torch.OutOfMemoryError'>"
    return is_named or (isinstance(error, RuntimeError) and OUT_OF_GPU_MEMORY.search(str(error)) is not None)


class TrainerGroup:
    """The trainer's ranks, numbered from 0."""

    def __init__(
        self, config: TelescopeConfig, placement: Placement, run_dir: Path, cluster: Cluster, *, loopback: bool = False
    ) -> None:
        """Starts the ranks. `loopback`: ranks and servers connect over loopback."""
        self._loopback = loopback
        self.world_size = config.trainer_num_workers
        self.config = config
        self._step_timeout = config.watchdog_seconds
        self._sync_timeout = config.weight_sync_timeout_seconds
        self._placement = placement
        self._node_names = cluster.node_names
        self._run_dir = run_dir
        self.queue = asyncio.Lock()
        self._num_restarts = 0
        self.num_replacements = 0
        """How often new processes were started. Communicators to the old ones are closed."""
        self._loss: RankLost | None = None
        self._has_loss = asyncio.Event()
        self._saving = Path()
        self._is_warming_up = False
        self._layouts = [Layout(rank, self.world_size) for rank in range(self.world_size)]  # `setup` asks the ranks
        self._logs = [RunFiles(run_dir).log(f"trainer-{rank}") for rank in range(self.world_size)]
        self._start()

    def _start(self) -> None:
        self.version = 0
        self.is_settled = True
        """Whether the ranks have the weights of `version`. False during a step and after a failed step."""
        self._log_starts = [log_size(path) for path in self._logs]
        cpus = self.config.ray_trainer_cpus_per_worker
        self._ranks = [
            make_actor(TrainerActor, self._placement.options("trainer", rank, cpus)).remote(
                self.config.to_json(), rank, self.world_size, str(self._run_dir)
            )
            for rank in range(self.world_size)
        ]

    @property
    def _nodes(self) -> list[str]:
        return [self._node_names.get(node, node) for node in self._placement.rank_nodes]

    async def watch(self) -> None:
        """Raises `RankLost` as soon as a command finds a rank lost."""
        await self._has_loss.wait()
        assert self._loss is not None
        raise self._loss

    async def replace(self) -> None:
        """Ends the ranks' processes and starts new ones. `setup` must follow.

        The caller has locked `queue`. Raises DeadlineExceeded when a node is lost and there is no other place.
        """
        what = "starting the ranks again, within ray_placement_timeout_s"
        for is_last in (False, True):
            for rank in self._ranks:
                ray.kill(rank)
            self._num_restarts += 1
            self.num_replacements += 1
            self._loss = None
            self._has_loss.clear()
            self._start()
            try:
                await self._all(what, self.config.ray_placement_timeout_s, "dump_stacks")
                break
            except RankLost:  # a rank was placed on a lost node before Ray noticed the loss
                if is_last:
                    raise
        self._placement.find_ranks()

    async def setup(self) -> list[Any]:
        """Connects the ranks and loads the model. Returns each rank's `TrainerInfo`."""
        host, port = await self._one(0, "opening the port of the ranks", "address", self._loopback)
        infos = await self._all("model setup", SETUP_TIMEOUT_SECONDS, "setup", host, port, self._loopback)
        self._devices = [info.device for info in infos]
        self._layouts = [info.layout for info in infos]
        check_layouts(self._layouts)
        return infos

    @property
    def data_size(self) -> int:
        """Returns the number of shares of a batch, after `setup`. `train_step` takes as many inputs."""
        return self._layouts[0].data_size

    @property
    def packs(self) -> bool:
        """Returns whether the samples of a micro-batch share a row, after `setup`."""
        return self._layouts[0].packs

    def _inputs(self, shares: list[StepInput]) -> list[Any]:
        """Returns the input of each rank. Ranks with the same data rank get the same input."""
        assert len(shares) == self.data_size
        if len(shares) == self.world_size:
            return [shares[layout.data_rank] for layout in self._layouts]
        stored = [ray.put(share) for share in shares]  # serialized once, however many ranks read it
        return [stored[layout.data_rank] for layout in self._layouts]

    def _sender(self, engine: int) -> int:
        """Returns the rank that sends to an engine. Engines are spread evenly over the sending ranks."""
        senders = [rank for rank, layout in enumerate(self._layouts) if layout.sends_weights]
        return senders[engine % len(senders)]

    @property
    def topology(self) -> dict[str, str]:
        """Returns node and device of each rank, after `setup`."""
        places = enumerate(zip(self._nodes, self._devices, strict=True))
        return {f"trainer rank {rank}": f"{node}, {device.replace('cpu', 'CPU')}" for rank, (node, device) in places}

    async def warm_up(self) -> list[Span]:
        """Compiles what the first training step would compile. Returns the span of each rank.

        Call it after `setup` and before any other command: a rank that compiles does not respond.
        """
        self._is_warming_up = True
        spans = await self._all("compiling the model's blocks", SETUP_TIMEOUT_SECONDS, "trainer.warm_up")
        self._is_warming_up = False
        return spans

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        """Runs one training step on all ranks. Element i of `inputs` is for data rank i.

        Metrics are reduced over the ranks; spans are of every rank.
        """
        by_rank = self._inputs(inputs)
        async with self.queue:
            self.is_settled = False  # until the step has ended on all ranks
            results: list[StepResult] = await self._all(
                f"training step {inputs[0].step}", self._step_timeout, "trainer.train_step", inputs=[by_rank]
            )
            self.version += 1
            self.is_settled = True
        spans: list[Span] = [span for result in results for span in result.spans]
        tokens = [one for result in results for one in result.tokens]
        return StepResult(metrics=results[0].metrics, spans=spans, tokens=tokens)

    async def restart(self) -> None:
        """Reloads the initial weights as version 0. The engines need a sync afterwards."""
        async with self.queue:
            await self._all("restart of the trainer", SETUP_TIMEOUT_SECONDS, "trainer.restart")
            self.version = 0
            self.is_settled = True
            self._num_restarts += 1

    @property
    def weights_identity(self) -> tuple[int, int]:
        """Returns restarts and version. Equal only for equal weights, since a restart counts versions from 0 again."""
        return self._num_restarts, self.version

    async def listen_for_engine(self, engine: int, num_workers: int) -> InitInfo:
        """Opens the sender's listener for an engine. Returns the data with which the engine's workers connect."""
        what = f"listening for engine {engine}"
        return await self._one(self._sender(engine), what, "listen_for_engine", engine, num_workers, self._loopback)

    async def connect_engine(self, engine: int) -> None:
        """Opens the sender's end of a communicator. The engine opens its end at the same time."""
        await self._one(self._sender(engine), f"connecting engine {engine}", "sender.connect", engine)

    async def abort_engine(self, engine: int, reason: str) -> None:
        """Aborts a transfer or connection that is blocked on this engine. Sends to other engines continue."""
        await self._one(self._sender(engine), f"abort of engine {engine}", "sender.abort", engine, reason)

    async def send_weights(
        self, update: UpdateInfo, engines: list[int], *, fingerprints: bool, corrupt: str | None = None
    ) -> list[SendReport]:
        """Sends the weights to these engines. Returns each rank's report. `corrupt`: see `WeightSender.send`."""
        what = f"sending weights of version {update.version}"
        timeout = self._sync_timeout + 60  # the transfer has its own deadline; this one catches ranks that miss it
        return await self._all(what, timeout, "send_weights", update, engines, fingerprints, corrupt)

    async def weight_metadata(self) -> list[TensorMeta]:
        """Returns names, shapes and types of the tensors that `send_weights` sends, in order."""
        return (await self._all("weight metadata", 300, "trainer.backend.weight_metadata"))[0]

    async def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Returns logprobs of tokens 1..L-1 of one unpacked text."""
        command = "trainer.backend.sequence_logprobs"
        return (await self._all("logprobs of a text", 300, command, token_ids, temperature))[0]

    async def packed_logprobs(self, inputs: list[StepInput]) -> dict[str, np.ndarray]:
        """Returns logprobs of the trained tokens by sample id. Samples are packed as in `inputs`."""
        what, by_rank = "logprobs of packed samples", [self._inputs(inputs)]
        per_rank = await self._all(what, self._step_timeout, "self_check", "packed_logprobs", inputs=by_rank)
        return {name: values_N for logprobs in per_rank for name, values_N in logprobs.items()}

    async def compare_gradients(self, first: list[StepInput], second: list[StepInput]) -> GradientComparison:
        """Compares the gradients of two packings of the same samples. Updates nothing."""
        what, by_rank = "gradients of two packings", [self._inputs(first), self._inputs(second)]
        return (await self._all(what, 2 * self._step_timeout, "self_check", "compare_gradients", inputs=by_rank))[0]

    async def save_checkpoint(self, step: int, directory: Path) -> None:
        """Copies weights and optimizer state, to be written to `directory` later. The caller has locked `queue`."""
        self._saving = directory
        what = f"copying the checkpoint after step {step}"
        await self._all(what, SETUP_TIMEOUT_SECONDS, "trainer.save_checkpoint", step, directory)

    async def finish_checkpoint(self) -> dict[str, str]:
        """Waits until the last checkpoint's files are complete and visible here. Raises `OSError`.

        Not collective, needs no lock. Returns the digests of the ranks' files.
        """
        command = "trainer.finish_checkpoint"
        digests = await self._all("writing a checkpoint", CHECKPOINT_TIMEOUT_SECONDS, command, group="checkpoint")
        directory = self._saving

        def missing_files() -> list[str]:
            from telescope.trainer.backends.fsdp import checkpoint  # the import takes a second: not in the event loop

            return checkpoint.missing_files(directory, self.config.train_backend)

        if missing := await asyncio.to_thread(missing_files):
            raise OSError(
                f"{directory} is incomplete on {socket.gethostname()}: {'; '.join(missing)}. All nodes must "
                "share the file system of the checkpoints: set checkpoint_dir to a folder of one"
            )
        return {name: digest for of_rank in digests for name, digest in of_rank.items()}

    async def load_checkpoint(self, step: int, directory: Path) -> None:
        """Loads a checkpoint as version `step`; the engines need a sync afterwards. The caller has locked `queue`."""
        command = "trainer.backend.load_checkpoint"
        await self._all(f"loading {directory}", SETUP_TIMEOUT_SECONDS, command, step, directory)
        self.version = step
        self.is_settled = True
        self._num_restarts += 1

    async def save_hf(self, directory: Path, origin: ModelOrigin) -> None:
        """Writes the current weights as a Hugging Face model folder."""
        await self._all("saving", SETUP_TIMEOUT_SECONDS, "trainer.save_hf", directory, origin)

    async def sync_adapter(self, directory: Path, dtype: str) -> int:
        """Writes the adapters as a folder that servers load. Returns the size of their weights in bytes."""
        what = f"writing the adapter of version {self.version}"
        sizes: list[int] = await self._all(what, self._sync_timeout + 60, "trainer.sync_adapter", directory, dtype)
        return sizes[0]

    async def take_readings(self, rank: int) -> ReadingBatch:
        """Returns this rank's memory readings since the last call. Not a collective: other commands may be running."""
        batch: ReadingBatch = await self._one(rank, "reading its gauges", "take_readings", group="observe")
        return replace(batch, node=self._nodes[rank])

    async def dump_stacks(self) -> dict[str, str]:
        """Returns the stacks of every rank's process, or why there are none."""
        return await dump_stacks("trainer rank", self._ranks)

    async def stop(self) -> None:
        """Lets the ranks close their communicators. Ray ends their processes with the placement group."""
        if not self._is_warming_up:  # ranks that compile do not respond, and have no communicator yet
            await stop_actors("trainer rank", self._ranks)

    async def _one(self, rank: int, what: str, command: str, *args: Any, group: str | None = "control") -> Any:
        """Runs one command on one rank. `what` names it in errors.

        It runs in a concurrency group of the actor (`ACTOR_OPTIONS`); with None, after the commands before it.
        """
        num_replacements = self.num_replacements
        call = self._ranks[rank].call.options(concurrency_group=group)
        try:
            return await answer(call.remote(command, *args), f"{what}, trainer rank {rank}")
        except ActorExited as error:
            loss = RankLost(self._exit_report(rank, what, str(error)))
            was_replaced = num_replacements != self.num_replacements
            if self._loss is None and not was_replaced:
                self._loss = loss
                self._has_loss.set()
            raise loss from None
        except Exception as error:
            if not _is_out_of_gpu_memory(error):
                raise
            logger.exception("%s, trainer rank %d", what, rank)
            advice = less_trainer_memory(self.config, self.config.recompute_attention is not False)
            changes = ", ".join(["Lower seq_len or entropy_chunk_size", *advice])
            raise RunError(
                f"Trainer rank {rank} ran out of GPU memory during: {what}. {changes}, or raise trainer_num_workers; "
                "`telescope train --dry-run` shows what takes how much "
                f"(docs/large-models.md), and `nvidia-smi` whether another process uses the GPU. The error: {error}"
            ) from error

    async def _all(
        self,
        what: str,
        timeout: float,
        command: str,
        *args: Any,
        inputs: Sequence[Sequence[Any]] = (),
        group: str | None = None,
    ) -> list[Any]:
        """Runs one command on all ranks within `timeout` seconds.

        The caller has locked `queue`, or is the only one. Rank r gets `args`, then element r of each of `inputs`.
        """
        inputs_of_ranks = zip(*inputs, strict=True) if inputs else [()] * self.world_size
        tasks = [
            asyncio.ensure_future(self._one(rank, what, command, *args, *own, group=group))
            for rank, own in enumerate(inputs_of_ranks)
        ]
        try:
            async with asyncio.timeout(timeout):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the trainer's ranks did not finish within {timeout:g} s; their stacks are in the run's logs"
            ) from None
        else:
            if any(task.exception() for task in done):
                # When a rank's process exits, the collectives of the others fail first.
                await asyncio.wait(tasks, timeout=RANK_EXIT_SECONDS)
                errors = [error for task in tasks if task.done() and (error := task.exception())]
                cause = next((error for error in errors if isinstance(error, RunError | UserError)), errors[0])
                if COLLECTIVE_ERRORS.search(repr(cause)) and not all(task.done() for task in tasks):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._has_loss.wait(), NODE_LOSS_SECONDS)
                raise self._loss or cause
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def _exit_report(self, rank: int, what: str, reason: str) -> str:
        """Describes how a rank's process exited, with the end of its log. `reason` is Ray's error."""
        log = log_tail(self._logs[rank], LOG_TAIL_BYTES, start=self._log_starts[rank])
        where = f"trainer rank {rank} on {self._nodes[rank]}"
        how = "was lost with its node" if "node has died" in reason else describe_rank_exit(log)
        ended = f"{where} {how} during: {what}. Its log ({self._logs[rank]})"
        return f"{ended} ends:\n{log}" if log else f"{ended} is empty"


def describe_rank_exit(log: str) -> str:
    """Returns how a rank's process exited, in words. Ray does not report its exit code; crashes are in the log."""
    if crashes := re.findall(r"Fatal Python error: (.+)", log):
        for number in CRASH_SIGNALS:
            if crashes[-1].replace("-", " ") == signal.strsignal(number):
                return f"was killed by {number.name}"
    return "was killed by SIGKILL (often sent by the kernel when memory runs out)"
