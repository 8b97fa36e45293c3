"""The pool of environment worker processes, as the driver uses it.

A call whose user code raises, hangs, exits or crashes ends in an `EnvironmentFailure` of that call alone. The process
is replaced if needed, and its other calls run again. This module turns the driver's requests into calls; `workers` runs
the processes, and `rollouts` tracks multi-turn rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telescope.environments.types import Advance, EnvironmentInfo, EnvironmentSpec, FirstPrompt, PreparedPrompt
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.rendering import RendererSpec
from telescope.rollout.stops import Stops
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.rollout.worker_pool.messages import PoolStatus, load_header, pack_ids, read_advance, unpack_ids
from telescope.rollout.worker_pool.rollouts import PoolRollouts
from telescope.rollout.worker_pool.scheduling import Call
from telescope.rollout.worker_pool.worker_handle import PoolWorker
from telescope.rollout.worker_pool.workers import WorkerPool

IDENTITIES_PER_CALL = 2_000


class EnvironmentPool:
    """Runs environments in `num_workers` processes. Every process loads all of them.

    `timeout_seconds` bounds one call of user code. `start_timeout_seconds` bounds loading, downloads included.
    `memory_limit_bytes` is what user code in one process may allocate after loading (default: a quarter of the
    machine's memory, at least 2 GiB). `launcher` lets several pools share one fork server, which must have been started
    with the same renderer; by default the pool starts its own. Workers log to `log_dir/environment-<i>.log`,
    rotated to `.log.1`.

    An environment whose resources exist once per host runs in one process. Its resources are prepared at the first
    call, or at the start with `eager_prepare_resources`, within `start_timeout_seconds`.
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        *,
        renderer: RendererSpec | None,
        num_workers: int,
        log_dir: Path,
        timeout_seconds: float = 120.0,
        environments_path: Sequence[str | Path] = (),
        start_timeout_seconds: float = 600.0,
        memory_limit_bytes: int | None = None,
        launcher: Launcher | None = None,
        eager_prepare_resources: bool = False,
        debug: bool = False,
    ) -> None:
        self._positions = {spec.identity: position for position, spec in enumerate(specs)}
        if len(self._positions) != len(specs):
            raise ValueError("two environments have the same key; give one of them a key of its own")
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; use 1 or more")
        self._specs = list(specs)
        self._start_timeout_seconds = start_timeout_seconds
        self._eager_prepare_resources = eager_prepare_resources
        self._workers = WorkerPool(
            specs,
            load_header(specs, environments_path, memory_limit_bytes) | {"debug": debug},
            num_workers=num_workers,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            log_dir=log_dir,
            launcher=launcher,
            make_launcher=lambda folder: Launcher(renderer, folder),
            on_ended=self._on_ended,
        )
        self._rollouts = PoolRollouts(self._workers)
        self._prepared: dict[int, asyncio.Future[Any]] = {}
        """Resources that are prepared or being prepared, by position of their environment."""

    async def start(self) -> None:
        """Starts all processes and loads all environments.

        Raises `UserError` for what the user can fix (unknown argument, missing package, empty dataset, no chat
        template), `DeadlineExceeded` when loading takes too long, `InfrastructureError` when a process cannot run.
        """
        try:
            await self._workers.start()
            if self._eager_prepare_resources:
                await asyncio.gather(*(self._resources(position) for position in range(len(self._specs))))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends all processes within seconds, whatever they are doing."""
        await self._workers.close()

    def status(self) -> PoolStatus:
        """Returns state and counts; cheap enough to call every second."""
        return self._workers.status(len(self._rollouts))

    def dump_stacks(self) -> None:
        """Makes every worker write its stacks to its log."""
        self._workers.dump_stacks()

    async def describe(self, env_key: str) -> EnvironmentInfo:
        """Returns the environment's description."""
        assert self._workers.infos is not None, "the pool is not started"
        return self._workers.infos[self._position(env_key)]

    @property
    def stops(self) -> Stops:
        """What ends an answer."""
        assert self._workers.infos is not None, "the pool is not started"
        return Stops(**self._workers.infos[0].stops)

    async def identities(self, env_key: str, start: int = 0, stop: int | None = None) -> list[str]:
        """Returns the `sample_uid` of dataset items from `start` up to `stop`."""
        position = self._position(env_key)
        stop = (await self.describe(env_key)).num_samples if stop is None else stop
        calls = []
        for low in range(start, stop, IDENTITIES_PER_CALL):
            high = min(low + IDENTITIES_PER_CALL, stop)
            label = f"environment {env_key!r}, items {low} to {high}: reading the dataset"
            calls.append(self._call({"op": "identities", "env": position, "start": low, "stop": high}, b"", label))
        return [uid for result, _ in await asyncio.gather(*calls) for uid in result["uids"]]

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of a dataset item. Raises `EnvironmentFailure`."""
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
        """Scores the completion of a single-turn environment.

        `for_eval` asks for the metrics of an evaluation instead of the reward. Raises `EnvironmentFailure` when user
        code raises, returns something malformed, exceeds the deadline, or ends its process.
        """
        label = f"environment {env_key!r}, item {index}: {'compute_eval_metrics' if for_eval else 'compute_reward'}"
        position = self._position(env_key)
        header = {"op": "advance", "env": position, "index": index, "stop_reason": stop_reason, "for_eval": for_eval}
        home = await self._resources(position)
        return read_advance(*await self._call(header, pack_ids(completion_token_ids), label, worker=home))

    async def begin(self, rollout: str, env_key: str, index: int, *, interleaved: bool = True) -> FirstPrompt:
        """Begins a multi-turn rollout over a dataset item. One process keeps its state.

        `rollout` is any id that no open rollout of the pool has. The prompt is the one that `prepare` returns.
        `interleaved` False renders the conversation again for every turn. Raises `EnvironmentFailure`.
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
        """Sends the next completion to the rollout's environment.

        With `done` the result holds the score and the rollout is over. Otherwise it holds the environment's messages
        and the token ids that precede the next completion.

        A `stop_reason` other than `stop` marks a truncated completion, which by default ends the rollout. A next prompt
        of `max_context` tokens or more also ends it: the trajectory so far is scored with the reason
        `context_exhausted`.

        Raises `EnvironmentFailure` as `advance` does, and `RolloutLost` when the worker process of the rollout has
        ended; after either the rollout is over. One call at a time for each rollout.
        """
        return await self._rollouts.respond(
            rollout, completion_token_ids, completion_logprobs, stop_reason, for_eval=for_eval, max_context=max_context
        )

    def cancel(self, rollout: str) -> None:
        """Ends a rollout at once.

        Cancels its pending call and calls the environment's `end_rollout`. Ignores unknown ids.
        """
        self._rollouts.cancel(rollout)

    # Calls

    def _position(self, env_key: str) -> int:
        try:
            return self._positions[env_key]
        except KeyError:
            known = ", ".join(self._positions)
            raise ValueError(f"the pool has no environment {env_key!r}; it has {known}") from None

    def _call(
        self, header: dict[str, Any], blob: bytes, label: str, *, worker: PoolWorker | None = None
    ) -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        """Starts a call; the future resolves to the answer's fields and blob."""
        return self._workers.call(header, blob, label, worker=worker).future

    async def _resources(self, position: int) -> PoolWorker | None:
        """Returns the worker with the environment's prepared resources. None when it needs none."""
        assert self._workers.infos is not None, "the pool is not started"
        if not self._workers.infos[position].shares_resources:
            return None
        home = self._home(position)
        if position not in self._prepared:
            label = f"environment {self._specs[position].identity!r}: prepare_resources"
            header = {"op": "resources", "env": position}
            limit = self._start_timeout_seconds
            call = self._workers.call(header, b"", label, worker=home, timeout_seconds=limit)
            self._prepared[position] = call.future
        preparing = self._prepared[position]
        try:
            await asyncio.shield(preparing)
        except (EnvironmentFailure, InfrastructureError):
            if self._prepared.get(position) is preparing:
                del self._prepared[position]  # the next call tries again
            raise
        return home

    def _on_ended(self, worker: PoolWorker, calls: list[Call], how: str) -> list[Call]:
        """Handles the end of a process: its calls fail or run again."""
        for position, preparing in list(self._prepared.items()):
            if preparing.done() and self._home(position) is worker:
                del self._prepared[position]
        return self._rollouts.lose_worker(worker, calls, how)

    def _home(self, position: int) -> PoolWorker:
        """Returns the only worker of an environment with per-host resources."""
        return self._workers.workers[position % len(self._workers.workers)]
