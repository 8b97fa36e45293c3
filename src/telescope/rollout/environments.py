"""Runs the environments of a rollout worker: user code in this process, with deadlines.

`Environment.rollout` is the turn loop (`rollout.turns`), unless an environment defines its own (`rollout.context`).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from telescope.environments.base import is_agent
from telescope.environments.context import MODEL
from telescope.environments.judge import USAGE
from telescope.environments.sandbox_tools import close_pools
from telescope.environments.types import PreparedPrompt, RewardRecord
from telescope.errors import DeadlineExceeded, EnvironmentFailure
from telescope.rollout.context import AgentRollout
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.sample import Rollout
from telescope.rollout.turns import MultiTurn, SingleTurn, take_turns
from telescope.rollout.user_thread import UserThread, user_failure

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = 32 * 2**20
"""Largest score from user code. It passes through the driver's memory into the record."""

START_SECONDS = 600.0
"""Time for one environment to prepare its resources."""

CLOSE_SECONDS = 20.0
"""Time for the environments to end rollouts and close resources."""


class LoadedEnvironments:
    """Implements `Environments`. Environments are found by the identity of their spec.

    `timeout_seconds` limits one call of user code.
    """

    def __init__(self, environments: Sequence[LoadedEnvironment], *, timeout_seconds: float) -> None:
        self.by_key = {each.spec.identity: each for each in environments}
        self._thread = UserThread(timeout_seconds)
        inner = [each.inner for each in environments if each.inner is not None]
        self._agents = [each for each in inner if is_agent(each)]
        for environment in inner:
            if not is_agent(environment):  # an agent's rollout may wait for longer
                environment.call_timeout_seconds = timeout_seconds
        self._endpoint: Endpoint | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if self._agents:
            from telescope.rollout.endpoint import Endpoint  # 4 MiB of aiohttp's server, which only agents need

            paths = {each.renderer.spec.tokenizer_path for each in environments if each.renderer is not None}
            self._endpoint = Endpoint([MODEL, *paths])

    @property
    def is_stuck(self) -> bool:
        return self._thread.is_stuck

    async def start(self) -> None:
        """Opens the endpoint for agents, if an environment needs it, and prepares the resources of this process."""
        if self._endpoint is not None:
            # The path of a Unix socket has at most 107 characters.
            self._folder = tempfile.TemporaryDirectory(prefix="telescope-", ignore_cleanup_errors=True)
            socket = Path(self._folder.name, "endpoint")
            await self._endpoint.start(socket)
            for environment in self._agents:
                environment.endpoint_socket = str(socket)
        for loaded in self.by_key.values():
            await loaded.prepare_own_resources()

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        label = f"environment {env_key!r}, item {index}: preparing the prompt"
        return await self._thread.call(partial(self.by_key[env_key].prepare, index), label)

    async def roll_out(self, rollout: Rollout) -> RewardRecord:
        task = rollout.task
        loaded = self.by_key[task.environment_key]
        owner, environment, renderer = loaded.environment, loaded.inner, loaded.renderer
        assert renderer is not None
        USAGE.set({})
        await self.prepare_resources(task.environment_key)

        def turns() -> Awaitable[RewardRecord]:
            kind = MultiTurn if owner.is_multi_turn else SingleTurn
            return take_turns(rollout, kind(rollout, loaded, self._thread))

        if environment is None or not is_agent(environment):
            reward = await turns()
        else:
            assert self._endpoint is not None
            try:
                agent = AgentRollout(rollout, environment, renderer, self._endpoint, turns)
                reward = await agent.run(owner.get_sample(task.item_index))
            except DeadlineExceeded:  # of a request slot: an error of the run
                raise
            except Exception as error:
                raise user_failure(error, f"{rollout.label}: rollout") from None
        if (size := len(msgspec.json.encode(reward))) > MAX_RESULT_BYTES:
            what = f"the environment's result has {size} bytes; the limit is {MAX_RESULT_BYTES}"
            raise EnvironmentFailure(f"{rollout.label} failed: {what}")
        return reward

    async def close(self) -> None:
        """Waits until rollouts have ended, then closes resources."""
        if self._endpoint is not None:
            await self._endpoint.stop()
        if self._folder is not None:
            self._folder.cleanup()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._thread.started:
                    await asyncio.wait(self._thread.started, timeout=CLOSE_SECONDS / 2)
                for loaded in self.by_key.values():
                    await loaded.close()
                for environment in self._agents:
                    await close_pools(environment)
        except TimeoutError:
            logger.warning("Ending rollouts and resources took over %g seconds", CLOSE_SECONDS)

    async def prepare_resources(self, env_key: str) -> None:
        """Waits until the resources of an environment are prepared."""
        label = f"environment {env_key!r}: prepare_resources"
        try:
            await asyncio.wait_for(self.by_key[env_key].prepare_resources(), START_SECONDS)
        except TimeoutError:
            raise EnvironmentFailure(f"{label} did not end within {START_SECONDS:g} seconds") from None
        except Exception as error:
            raise user_failure(error, label) from None
