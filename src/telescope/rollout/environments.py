"""Runs the environments of a rollout worker: user code in this process, with deadlines.

`Environment.rollout` is the turn loop (`rollout.turns`), unless an environment defines its own (`rollout.context`).
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import msgspec

from telescope.environments.base import is_agent, wrapped_environment
from telescope.environments.context import MODEL
from telescope.environments.judge import USAGE
from telescope.environments.sandbox_tools import close_pools
from telescope.environments.types import PreparedPrompt, RewardRecord
from telescope.errors import DeadlineExceeded, EnvironmentFailure
from telescope.rollout.context import AgentRollout
from telescope.rollout.endpoint import Endpoint
from telescope.rollout.environment_runner import EnvironmentRunner
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
    """Implements `Environments` with a runner. Environments are found by the identity of their spec.

    `timeout_seconds` limits one call of user code.
    """

    def __init__(self, runner: EnvironmentRunner, *, timeout_seconds: float) -> None:
        self._runner = runner
        self._positions = {spec.identity: position for position, spec in enumerate(runner.specs)}
        self._thread = UserThread(timeout_seconds)
        found = [wrapped_environment(each) for each in runner.environments]
        self._agents = [each for each in found if each is not None and is_agent(each)]
        self._endpoint = Endpoint([MODEL, *([runner.renderer.spec.tokenizer_path] if runner.renderer else [])])

    @property
    def is_stuck(self) -> bool:
        return self._thread.is_stuck

    async def start(self) -> None:
        """Opens the endpoint for agents, if an environment needs it, and prepares the resources of this process."""
        if self._agents:
            # The path of a Unix socket has at most 107 characters.
            self._folder = tempfile.TemporaryDirectory(prefix="telescope-", ignore_cleanup_errors=True)
            socket = Path(self._folder.name, "endpoint")
            await self._endpoint.start(socket)
            for environment in self._agents:
                environment.endpoint_socket = str(socket)
        await self._runner.prepare_own_resources()

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        label = f"environment {env_key!r}, item {index}: preparing the prompt"
        return await self._thread.call(partial(self._runner.prepare, self._positions[env_key], index), label)

    async def roll_out(self, rollout: Rollout) -> RewardRecord:
        task, runner = rollout.task, self._runner
        position = self._positions[task.environment_key]
        owner = runner.environments[position]
        environment = wrapped_environment(owner)
        assert runner.renderer is not None
        USAGE.set({})
        await self.prepare_resources(position)

        def turns() -> Awaitable[RewardRecord]:
            kind = MultiTurn if owner.is_multi_turn else SingleTurn
            return take_turns(rollout, kind(rollout, runner, position, self._thread))

        if environment is None or not is_agent(environment):
            reward = await turns()
        else:
            try:
                agent = AgentRollout(rollout, environment, runner.renderer, self._endpoint, turns)
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
        await self._endpoint.stop()

        async def close_resources() -> None:
            if self._thread.started:
                await asyncio.wait(self._thread.started, timeout=CLOSE_SECONDS / 2)
            await self._runner.close()
            for environment in self._agents:
                await close_pools(environment)

        try:
            await asyncio.wait_for(close_resources(), CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("Ending rollouts and resources took over %g seconds", CLOSE_SECONDS)

    async def prepare_resources(self, position: int) -> None:
        """Waits until the resources of an environment are prepared."""
        label = f"environment {self._runner.specs[position].identity!r}: prepare_resources"
        try:
            await asyncio.wait_for(self._runner.resources[position].ready(), START_SECONDS)
        except TimeoutError:
            raise EnvironmentFailure(f"{label} did not end within {START_SECONDS:g} seconds") from None
        except Exception as error:
            raise user_failure(error, label) from None
