"""All trainer ranks behind one door: what the driver asks of the trainer goes through here, one command at a time.

Rank commands are collectives: every rank must run the same ones in the same order. So whoever runs one holds `queue`
(`train_step` takes it by itself, a weight sync holds it from its first command to its last), and a single server can be
given weights between two training steps. `version` counts the steps that the ranks' weights contain; it changes only
while `queue` is held. Each command has a deadline and a name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.cluster.actors import TrainerActor, answer, make_actor
from telescope.cluster.placement import Placement
from telescope.cluster.ray_cluster import Cluster
from telescope.config import TelescopeConfig
from telescope.errors import DeadlineExceeded
from telescope.record.gauges import ReadingBatch
from telescope.trainer.batch import Span, StepInput, StepResult
from telescope.weights.plan import InitInfo, TensorMeta, UpdateInfo, sender_rank

if TYPE_CHECKING:
    import numpy as np

    from telescope.trainer.self_check import GradientComparison
    from telescope.weights.sender import SendReport

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_SECONDS = 1800.0
"""Loading a large model from a slow disk; compiling its blocks on a slow CPU."""

STOP_TIMEOUT_SECONDS = 20.0


class TrainerGroup:
    """The trainer's ranks, numbered from 0; which of them serves an engine is `weights.plan.sender_rank`'s."""

    def __init__(self, config: TelescopeConfig, placement: Placement, run_dir: Path, cluster: Cluster) -> None:
        self.world_size = config.trainer_num_workers
        self._config = config
        self._step_timeout = config.watchdog_seconds
        self._sync_timeout = config.weight_sync_timeout_seconds
        self.queue = asyncio.Lock()
        self.version = 0
        self._num_restarts = 0
        self._is_warming_up = False
        self._nodes = [cluster.node_names[node] for node in placement.rank_nodes]
        self._ranks = [
            make_actor(TrainerActor, placement.rank_options(rank, config.ray_trainer_cpus_per_worker)).remote(
                config.to_json(), rank, self.world_size, str(run_dir)
            )
            for rank in range(self.world_size)
        ]

    async def setup(self, *, loopback: bool) -> list[Any]:
        """Make the ranks meet and load the model. Returns each rank's `TrainerInfo`."""
        host, port = await answer(self._ranks[0].address.remote(loopback), "address of trainer rank 0")
        return await self._all(
            "model setup", lambda rank: self._ranks[rank].setup.remote(host, port, loopback), SETUP_TIMEOUT_SECONDS
        )

    async def warm_up(self) -> list[Span]:
        """Compile what the first training step would. Returns when each rank did. After `setup`, and before any other
        command, since none but the end of the run is for a rank that is at it."""
        self._is_warming_up = True
        spans = await self._all(
            "compiling the model's blocks", lambda rank: self._ranks[rank].warm_up.remote(), SETUP_TIMEOUT_SECONDS
        )
        self._is_warming_up = False
        return spans

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        """One training step on all ranks. Metrics are those that the ranks agreed on; spans are of every rank."""
        async with self.queue:
            results: list[StepResult] = await self._all(
                f"training step {inputs[0].step}",
                lambda rank: self._ranks[rank].train_step.remote(inputs[rank]),
                self._step_timeout,
            )
            self.version += 1
        spans: list[Span] = [span for result in results for span in result.spans]
        return StepResult(metrics=results[0].metrics, spans=spans)

    async def restart(self) -> None:
        """Start over from the weights that the config names, as version 0; the engines need a sync after it."""
        async with self.queue:
            await self._all(
                "restart of the trainer", lambda rank: self._ranks[rank].restart.remote(), SETUP_TIMEOUT_SECONDS
            )
            self.version = 0
            self._num_restarts += 1

    @property
    def weights_identity(self) -> tuple[int, int]:
        """Restarts and version: equal only if the weights are, for after a restart versions are counted anew."""
        return self._num_restarts, self.version

    def _sender_of(self, engine: int) -> Any:
        """The actor of the rank that sends to this engine."""
        return self._ranks[sender_rank(engine, self.world_size)]

    async def listen_for_engine(self, engine: int, num_workers: int, *, loopback: bool) -> InitInfo:
        """Open the sender's door for an engine. Returns what the engine's workers must be told."""
        rank = self._sender_of(engine)
        return await answer(
            rank.listen_for_engine.remote(engine, num_workers, loopback), f"listening for engine {engine}"
        )

    async def connect_engine(self, engine: int) -> None:
        """The sender's half of opening a communicator; the engine's half runs at the same time."""
        await answer(self._sender_of(engine).connect_engine.remote(engine), f"connecting engine {engine}")

    async def abort_engine(self, engine: int, reason: str) -> None:
        """Make a send or a connecting that is blocked on this engine give it up; sends to other engines go on."""
        await answer(self._sender_of(engine).abort_engine.remote(engine, reason), f"abort of engine {engine}")

    async def send_weights(
        self, update: UpdateInfo, engines: list[int], *, fingerprints: bool, corrupt: str | None = None
    ) -> list[SendReport]:
        """Send the current weights to these engines. Returns each rank's report. `corrupt`: see `WeightSender.send`."""
        return await self._all(
            f"sending weights of version {update.version}",
            lambda rank: self._ranks[rank].send_weights.remote(update, engines, fingerprints, corrupt),
            # The transfer has a deadline of its own; this one catches a rank that does not keep it.
            self._sync_timeout + 60,
        )

    async def weight_metadata(self) -> list[TensorMeta]:
        """Names, shapes and types of what `send_weights` sends, in its order."""
        return (await self._all("weight metadata", lambda rank: self._ranks[rank].weight_metadata.remote(), 300))[0]

    async def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Logprobs of tokens 1..L-1 of one text, computed by itself, under the trainer's current weights."""
        results = await self._all(
            "logprobs of a text",
            lambda rank: self._ranks[rank].sequence_logprobs.remote(token_ids, temperature),
            300,
        )
        return results[0]

    async def packed_logprobs(self, inputs: list[StepInput]) -> dict[str, np.ndarray]:
        """Logprobs of the trained tokens of every sample in `inputs`, as packed there, by sample id."""
        shares = await self._all(
            "logprobs of packed samples",
            lambda rank: self._ranks[rank].packed_logprobs.remote(inputs[rank]),
            self._step_timeout,
        )
        return {name: values_N for share in shares for name, values_N in share.items()}

    async def compare_gradients(self, first: list[StepInput], second: list[StepInput]) -> GradientComparison:
        """The gradients of two packings of the same samples, on the ranks that would train them. Nothing is updated."""
        results = await self._all(
            "gradients of two packings",
            lambda rank: self._ranks[rank].compare_gradients.remote(first[rank], second[rank]),
            2 * self._step_timeout,
        )
        return results[0]

    async def save_hf(self, directory: Path) -> None:
        """Write the current weights as a Hugging Face model folder."""
        await self._all("saving", lambda rank: self._ranks[rank].save_hf.remote(str(directory)), SETUP_TIMEOUT_SECONDS)

    async def take_readings(self, rank: int) -> ReadingBatch:
        """What this rank's memory was since the last call. No collective: other commands may be under way."""
        batch: ReadingBatch = await answer(self._ranks[rank].take_readings.remote(), f"gauges of trainer rank {rank}")
        return replace(batch, node=self._nodes[rank])

    async def dump_stacks(self) -> dict[str, str]:
        """Stacks of every rank's process, or why they could not be had."""
        stacks: dict[str, str] = {}
        for rank, actor in enumerate(self._ranks):
            try:
                async with asyncio.timeout(5):
                    stacks[f"trainer rank {rank}"] = await actor.dump_stacks.remote()
            except Exception as error:
                stacks[f"trainer rank {rank}"] = f"no answer: {error!r}"
        return stacks

    async def stop(self) -> None:
        """Let the ranks close their communicators; Ray ends their processes with the placement group."""
        if self._is_warming_up:
            return  # they cannot answer before they have compiled, and have no communicator to a server yet
        results = await asyncio.gather(
            *(asyncio.wait_for(_as_future(rank.stop.remote()), STOP_TIMEOUT_SECONDS) for rank in self._ranks),
            return_exceptions=True,
        )
        for rank, result in enumerate(results):
            if isinstance(result, Exception):
                logger.warning("trainer rank %d did not stop by itself: %r", rank, result)

    async def _all(self, what: str, call: Callable[[int], Any], timeout: float) -> list[Any]:
        """Run one command on all ranks within `timeout` seconds. The caller holds `queue`, or is the only one."""
        try:
            async with asyncio.timeout(timeout):
                calls = (answer(call(rank), f"{what}, trainer rank {rank}") for rank in range(self.world_size))
                return list(await asyncio.gather(*calls))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the trainer's ranks did not finish within {timeout:g} s; their stacks are in the run's logs"
            ) from None


async def _as_future(reference: Any) -> Any:
    return await reference
