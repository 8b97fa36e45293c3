"""Plays the policy for environments that are loaded in this process: real rollouts, answered turn by turn by a test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.unit.rollout.fakes import FakeLanes, generation, settings

from telescope.environments.types import RewardRecord
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.inference.base import GenerateRequest, Generation
from telescope.rollout.environments import LoadedEnvironments
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.sample import Rollout, RolloutTask
from telescope.rollout.sample_rows import tool_call_rows
from telescope.rollout.trajectory import Trajectory


@dataclass
class Asked:
    """What a rollout does next: it asks for an answer to a prompt, or is `done`."""

    done: bool
    token_ids: list[int]
    """The whole prompt."""
    append_token_ids: list[int]
    messages: list[dict[str, str]]
    """Those of the environment since the last answer; at the start, those of the first prompt."""
    restarts: bool = False
    divergence: str | None = None
    completion_text: str = ""
    tool_calls: Sequence[Any] = ()
    reward: RewardRecord | None = None
    end_reason: str | None = None


class _Played(Rollout):
    """A rollout whose requests for answers wait in `asked`."""

    def __init__(self, task: RolloutTask, environments: LoadedEnvironments) -> None:
        super().__init__(
            task, slot_key=0, slots=FakeLanes(), engine_of=lambda server: self, environments=environments,
            settings=settings(max_context=10**6, max_tokens=10**6, max_infrastructure_retries=0),
        )  # fmt: skip
        self.asked: asyncio.Queue[tuple[list[int], dict[str, Any]]] = asyncio.Queue()
        self.answers: asyncio.Queue[Generation] = asyncio.Queue()
        self.loaded_version = 0
        self.running = asyncio.ensure_future(self.run())

    async def sample(self, prompt_token_ids: list[int], **of_turn: Any) -> int:
        self.asked.put_nowait((prompt_token_ids, of_turn))
        return await super().sample(prompt_token_ids, **of_turn)

    async def generate(self, request: GenerateRequest) -> Generation:
        """The engine's side."""
        return await self.answers.get()

    async def abort(self, request_ids: list[str]) -> None:
        raise AssertionError("the player aborts it")

    async def next(self) -> Asked:
        """Waits for what it does next. Raises what masks it."""
        asked = asyncio.ensure_future(self.asked.get())
        await asyncio.wait({asked, self.running}, return_when=asyncio.FIRST_COMPLETED)
        turns = self.trajectory.turns
        last = turns[-1] if turns else None
        text, calls = ("", []) if last is None else (last.text, last.tool_calls)
        if asked.done():
            ids, turn = asked.result()
            keys = ("role", "content", "turn_type")
            messages = [
                {key: value for key, value in zip(keys, reply, strict=True) if value} for reply in turn["replies"]
            ]
            restarts = last is not None and turn["parent"] is None
            return Asked(False, ids, turn["added_token_ids"], messages, restarts, turn["divergence"], text, calls)
        asked.cancel()
        ended: Trajectory = await self.running
        if ended.cancelled:
            raise asyncio.CancelledError
        if ended.failure_kind is not None:
            kind = EnvironmentFailure if ended.failure_kind == "environment" else InfrastructureError
            raise kind(ended.failure_message)
        return Asked(True, [], [], [], False, None, text, calls, ended.reward, ended.end_reason)


class Player:
    """Rollouts of loaded environments, by names of the test."""

    def __init__(self, environments: Sequence[LoadedEnvironment], *, timeout_seconds: float = 20.0) -> None:
        self.environments = LoadedEnvironments(environments, timeout_seconds=timeout_seconds)
        self._rollouts: dict[str, _Played] = {}

    async def begin(self, name: str, key: str, index: int, *, interleaved: bool = True) -> Asked:
        """Begins a rollout, and waits for its first prompt."""
        prompt = self.environments.by_key[key].prepare(index)
        task = RolloutTask(name, 0, 0, key, key, index, prompt.token_ids, (0,))
        self._rollouts[name] = played = _Played(task, self.environments)
        played.settings = replace(played.settings, interleaved=interleaved)
        asked = await played.next()
        asked.messages = prompt.messages
        return asked

    async def respond(
        self,
        name: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
        stop_reason: str = "stop",
        *,
        max_context: int | None = None,
        for_eval: bool = False,
    ) -> Asked:
        """Answers, and waits for what the rollout does next."""
        played = self._rollouts[name]
        sampling = replace(played.settings.sampling, max_context=max_context or 10**6)
        played.settings = replace(played.settings, sampling=sampling, for_eval=for_eval)
        ids = np.array(token_ids, np.int64)
        given = np.array(logprobs or np.zeros(len(ids)), np.float32)
        played.answers.put_nowait(Generation(ids, given, stop_reason, [(0, 0, len(ids))] if len(ids) else []))
        return await played.next()

    async def answer(
        self, key: str, index: int, token_ids: Sequence[int], stop_reason: str = "stop", *, for_eval: bool = False
    ) -> Asked:
        """Runs a rollout of one answer."""
        name = f"single {len(self._rollouts)}"
        await self.begin(name, key, index)
        return await self.respond(name, token_ids, (), stop_reason, for_eval=for_eval)

    def said(self, name: str) -> list[str]:
        """Returns the recorded answers of a rollout."""
        return [turn.text for turn in self._rollouts[name].trajectory.turns]

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """Returns the turn, name and error of each recorded tool call of a rollout."""
        rows = tool_call_rows(self._rollouts[name].trajectory)
        return [(row["turn"], row["name"], row["error"]) for row in rows]

    def cancel(self, name: str) -> None:
        """Cancels a rollout, which ends with the request that it has in the engine."""
        if self._rollouts[name].cancel():
            self._rollouts[name].answers.put_nowait(generation([], finish_reason="abort"))

    async def close(self) -> None:
        """Ends open rollouts as a worker does, and the environments."""
        running = [played.running for played in self._rollouts.values() if not played.running.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.environments.close()


def play_once(
    loaded: LoadedEnvironment, token_ids: Sequence[int], stop_reason: str, **options: Any
) -> tuple[Asked, Asked]:
    """Runs the first item of an environment to its first answer. Returns the first prompt, and what follows."""

    async def play() -> tuple[Asked, Asked]:
        player = Player([loaded])
        try:
            first = await player.begin("r", loaded.spec.identity, 0)
            return first, await player.respond("r", token_ids, (), stop_reason, **options)
        finally:
            await player.close()

    return asyncio.run(play())
