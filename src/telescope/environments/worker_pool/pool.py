"""Environments behind worker processes, as the driver uses them.

The pool keeps its promises whatever user code does: a call that raises, hangs, exits or crashes becomes an
`EnvironmentFailure` of that call alone; the process is replaced if it has to be, and what else was in it runs again.
This module owns what is asked of the processes; the processes are `crew`'s, rollouts of several turns are those of
`pool_rollouts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telescope.environments.worker_pool.launcher import Launcher
from telescope.environments.worker_pool.messages import (
    Advance,
    EnvironmentInfo,
    EnvironmentSpec,
    FirstPrompt,
    PoolStatus,
    PreparedPrompt,
    RendererSpec,
    RewardRecord,
    load_header,
    pack_ids,
    unpack_ids,
)
from telescope.environments.worker_pool.rollouts import PoolRollouts
from telescope.environments.worker_pool.scheduling import Call
from telescope.environments.worker_pool.worker_handle import PoolWorker
from telescope.environments.worker_pool.workers import WorkerPool
from telescope.errors import EnvironmentFailure, InfrastructureError

IDENTITIES_PER_CALL = 2_000


class EnvironmentPool:
    """Runs environments in `num_workers` processes; every process has all of them.

    `timeout_seconds` bounds one call of user code. `start_timeout_seconds` bounds loading, downloads included.
    `memory_limit_bytes` is what user code in one process may allocate after loading (default: a quarter of the
    machine's memory, at least 2 GiB). `launcher` lets several pools share one fork server, which must have been started
    with the same renderer; without it the pool has its own. Workers log to `log_dir/environment-<i>.log`.

    An environment with resources that a host has once is played in one process; they are prepared when they are first
    asked for, or at the start with `eager_prepare_resources`, within `start_timeout_seconds`.
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        *,
        renderer: RendererSpec | None,
        num_workers: int,
        timeout_seconds: float = 120.0,
        environments_path: Sequence[str | Path] = (),
        log_dir: Path | None = None,
        start_timeout_seconds: float = 600.0,
        memory_limit_bytes: int | None = None,
        launcher: Launcher | None = None,
        eager_prepare_resources: bool = False,
    ) -> None:
        self._positions = {spec.identity: position for position, spec in enumerate(specs)}
        if len(self._positions) != len(specs):
            raise ValueError("two environments have the same key; give one of them a key of its own")
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; use 1 or more")
        self._specs = list(specs)
        self._start_timeout_seconds = start_timeout_seconds
        self._eager_prepare_resources = eager_prepare_resources
        self._crew = WorkerPool(
            specs,
            load_header(specs, environments_path, memory_limit_bytes),
            num_workers=num_workers,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            log_dir=log_dir,
            launcher=launcher,
            make_launcher=lambda folder: Launcher(renderer, folder),
            on_gone=self._on_gone,
        )
        self._rollouts = PoolRollouts(self._crew.call, self._crew.queue)
        self._prepared: dict[int, asyncio.Future[Any]] = {}
        """Resources by position of their environment: prepared, or being prepared."""

    async def start(self) -> None:
        """Start all processes and load all environments.

        Raises `UserError` for what a person can mend (unknown argument, missing package, empty dataset, no chat
        template), `DeadlineExceeded` when loading takes too long, `InfrastructureError` when a process cannot live.
        """
        try:
            await self._crew.start()
            if self._eager_prepare_resources:
                await asyncio.gather(*(self._resources(position) for position in range(len(self._specs))))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all processes; within seconds, whatever they are doing."""
        await self._crew.close()

    def status(self) -> PoolStatus:
        """State and counts; cheap enough to ask every second."""
        return self._crew.status(len(self._rollouts))

    def dump_stacks(self) -> None:
        """Have every worker write its stacks to its log."""
        self._crew.dump_stacks()

    async def describe(self, env_key: str) -> EnvironmentInfo:
        """What the environment says of itself."""
        assert self._crew.infos is not None, "the pool is not started"
        return self._crew.infos[self._position(env_key)]

    async def identities(self, env_key: str, start: int = 0, stop: int | None = None) -> list[str]:
        """`sample_uid` of the dataset items from `start` up to `stop`, without rendering them."""
        position = self._position(env_key)
        stop = (await self.describe(env_key)).num_samples if stop is None else stop
        chunks = [(low, min(low + IDENTITIES_PER_CALL, stop)) for low in range(start, stop, IDENTITIES_PER_CALL)]
        answers = await asyncio.gather(
            *(
                self._call(
                    {"op": "identities", "env": position, "start": low, "stop": high},
                    b"",
                    f"environment {env_key!r}, items {low} to {high}: reading them",
                )
                for low, high in chunks
            )
        )
        return [uid for result, _ in answers for uid in result["uids"]]

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        """Render and tokenise the prompt of a dataset item. Raises `EnvironmentFailure`."""
        label = f"environment {env_key!r}, item {index}: preparing the prompt"
        header = {"op": "prepare", "env": self._position(env_key), "index": index}
        result, blob = await self._call(header, b"", label)
        return PreparedPrompt(unpack_ids(blob), result["text"], result["messages"], result["sample_uid"])

    async def advance(
        self,
        env_key: str,
        index: int,
        completion_token_ids: Sequence[int] | np.ndarray,
        stop_reason: str,
        *,
        for_eval: bool = False,
    ) -> Advance:
        """Hand the environment a completion; of a single turn this is the end, with its reward.

        `for_eval` asks for the metrics of an evaluation instead of the reward. Raises `EnvironmentFailure` when user
        code raises, returns something malformed, exceeds the deadline, or ends its process.
        """
        label = f"environment {env_key!r}, item {index}: {'compute_eval_metrics' if for_eval else 'compute_reward'}"
        position = self._position(env_key)
        header = {
            "op": "advance",
            "env": position,
            "index": index,
            "stop_reason": stop_reason,
            "for_eval": for_eval,
        }
        home = await self._resources(position)
        result, _ = await self._call(header, pack_ids(completion_token_ids), label, place=home)
        return Advance(True, [], result["text"], RewardRecord(**result["score"]), result["seconds"])

    async def begin(self, rollout: str, env_key: str, index: int, *, interleaved: bool = True) -> FirstPrompt:
        """Begin a rollout of several turns over a dataset item, in a process that will hold it to its end.

        `rollout` is any id that no open rollout of the pool has. The prompt is the one that `prepare` gives.
        `interleaved` False renders the conversation anew for every turn. Raises `EnvironmentFailure`.
        """
        position = self._position(env_key)
        if not (await self.describe(env_key)).is_multi_turn:
            raise ValueError(f"the environment {env_key!r} has single turns; use advance")
        home = await self._resources(position)
        label = f"environment {env_key!r}, item {index}, rollout {rollout!r}"
        return await self._rollouts.begin(rollout, position, index, label, home, interleaved=interleaved)

    async def respond(
        self,
        rollout: str,
        completion_token_ids: Sequence[int] | np.ndarray,
        completion_logprobs: Sequence[float] | np.ndarray = (),
        stop_reason: str = "stop",
        *,
        max_context: int | None = None,
        for_eval: bool = False,
    ) -> Advance:
        """Hand the rollout's environment the next completion. With `done` the answer holds the score and the rollout is
        over; otherwise it holds what the environment said, and the token ids that lead to the next completion.

        A `stop_reason` other than `stop` says that the completion was cut off, which by default ends the rollout. So
        does a next prompt of `max_context` tokens or more, which leaves no room to answer: the trajectory so far is
        scored then, and the reason is `context_exhausted`.

        Raises `EnvironmentFailure` as `advance` does and `RolloutLost` when the process that held the rollout has
        ended; after either the rollout is over. One call at a time for each rollout.
        """
        return await self._rollouts.respond(
            rollout, completion_token_ids, completion_logprobs, stop_reason, for_eval=for_eval, max_context=max_context
        )

    def cancel(self, rollout: str) -> None:
        """Give a rollout up, whatever it is doing; its environment is told (`end_rollout`). A call of it that is waited
        for is cancelled. Unknown ids are not an error."""
        self._rollouts.cancel(rollout)

    # Calls

    def _position(self, env_key: str) -> int:
        try:
            return self._positions[env_key]
        except KeyError:
            known = ", ".join(self._positions)
            raise ValueError(f"the pool has no environment {env_key!r}; it has {known}") from None

    def _call(
        self, header: dict[str, Any], blob: bytes, label: str, *, place: PoolWorker | None = None
    ) -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        """A future of the answer's fields and blob."""
        return self._crew.call(header, blob, label, place=place).future

    async def _resources(self, position: int) -> PoolWorker | None:
        """The worker that has the resources of an environment, when they are there; None when it needs none."""
        assert self._crew.infos is not None, "the pool is not started"
        if not self._crew.infos[position].shares_resources:
            return None
        home = self._home(position)
        if position not in self._prepared:
            label = f"environment {self._specs[position].identity!r}: prepare_resources"
            header = {"op": "resources", "env": position}
            limit = self._start_timeout_seconds
            call = self._crew.call(header, b"", label, place=home, timeout_seconds=limit)
            self._prepared[position] = call.future
        preparing = self._prepared[position]
        try:
            await asyncio.shield(preparing)
        except (EnvironmentFailure, InfrastructureError):
            if self._prepared.get(position) is preparing:
                del self._prepared[position]  # whoever asks next tries again
            raise
        return home

    def _on_gone(self, worker: PoolWorker, calls: list[Call], how: str) -> list[Call]:
        """A process has ended: what was in it is lost or runs again."""
        for position, preparing in list(self._prepared.items()):
            if preparing.done() and self._home(position) is worker:
                del self._prepared[position]
        return self._rollouts.lose(worker, calls, how)

    def _home(self, position: int) -> PoolWorker:
        """The worker that plays an environment with resources of the host."""
        return self._crew.workers[position % len(self._crew.workers)]
