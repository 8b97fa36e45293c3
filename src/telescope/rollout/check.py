"""Checks an environment: runs its items through rollout, tokenizer, joins and grader with scripted answers.

The reference solution must earn the full reward, and no cheat may earn any (`Environment.solution`, `cheats`). An
environment without a known solution is tried with the sample's answer in the forms that rewards usually read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from telescope.environments.base import GOLD, Environment
from telescope.environments.local_rollout import ChatServer
from telescope.environments.types import EnvironmentSpec
from telescope.errors import EnvironmentFailure, InfrastructureError, UserError
from telescope.inference.base import GenerateRequest, Generation
from telescope.rollout.environments import LoadedEnvironments
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Renderer
from telescope.rollout.request_slots import RequestSlotPool
from telescope.rollout.sample import Rollout, RolloutSettings, RolloutTask, SamplingSettings
from telescope.rollout.trajectory import Trajectory
from telescope.rollout.user_thread import report_blocking

REFERENCE, CANNED, MODEL = "reference solution", "canned answer", "the model"
FORMS = ("<answer>{}</answer>", "\\boxed{{}}", "{}")
"""Forms of an answer. The last is only the gold."""
CANNED_ANSWER = "I do not know."
MAX_CALLS = 200
"""Most calls of one rollout. A rollout that asks for more would never end."""
MAX_CONTEXT, MAX_TOKENS = 65_536, 32_768


@dataclass(slots=True)
class ScriptedEngine:
    """Returns scripted texts, repeating the last one, or asks a vLLM `server`."""

    renderer: Renderer
    answers: Sequence[str] = ()
    server: ChatServer | None = None
    loaded_version: int = 0
    num_calls: int = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns the next completion. Raises `InfrastructureError` after `MAX_CALLS`."""
        if self.num_calls == MAX_CALLS:
            raise InfrastructureError(f"it asked for more than {MAX_CALLS} answers")
        self.num_calls += 1
        if self.server is None:
            text, ended = self.answers[min(self.num_calls, len(self.answers)) - 1], True
        else:
            text, ended = await asyncio.to_thread(
                self.server.complete, request.prompt_token_ids, list(request.stop_token_ids), list(request.stop)
            )
        ends = self.renderer.stops.token_ids
        ids = [*self.renderer.encode_continuation(text), *(ends[:1] if ended else ())]
        ended, ids = ended and len(ids) <= request.max_tokens, ids[: request.max_tokens]
        spans = [(self.loaded_version, 0, len(ids))] if ids else []
        return Generation(np.array(ids, np.int64), np.zeros(len(ids), np.float32), "stop" if ended else "length", spans)

    async def abort(self, request_ids: list[str]) -> None:
        """Does nothing, because completions take no time."""


@dataclass(slots=True)
class Trial:
    """The result of the answers to one item. `name` is the reference solution, a cheat or another source."""

    item: int
    name: str
    answers: Sequence[str]
    trajectory: Trajectory
    full_reward: float | None
    """None: any reward above 0 counts as full."""

    @property
    def reward(self) -> float | None:
        """Returns the reward. None for a failed rollout."""
        record = self.trajectory.reward
        return None if record is None else record.total_reward

    @property
    def problem(self) -> str | None:
        """Returns what is wrong with the reward, and the fix. None if it is right."""
        reward, kind = self.reward, self.trajectory.failure_kind
        if reward is None:
            is_fine = kind == "infrastructure" and self.name not in (REFERENCE, CANNED, MODEL)  # masked, not rewarded
            return None if is_fine else self.trajectory.failure_message
        if self.name in (CANNED, MODEL):
            return None
        if self.name != REFERENCE:
            fix = f"{self.answers[0][:80]!r} earned {reward:g}. Let the reward be 0 for it, or override `cheats`"
            return fix if reward > 0 else None
        needed = self.full_reward
        if reward > 0 if needed is None else reward >= needed - 1e-6:
            return None
        wanted = "a reward" if needed is None else f"{needed:g}"
        return (
            f"{self.answers[-1][:80]!r} earned {reward:g} instead of {wanted}. Correct the reward, or return answers "
            "that earn it from `solution(self, sample)`, or give their form (--solution)"
        )


class Checks:
    """The trials of one environment. Starts nothing before `run`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        renderer: Renderer,
        path: Sequence[str] = (),
        *,
        timeout_seconds: float = 120.0,
        server: ChatServer | None = None,
        form: str | None = None,
    ) -> None:
        """Loads the environment and its dataset. Raises `UserError` as a run does.

        `form` is the form of the reference solution, with `{}` for the sample's answer.
        """
        self._forms = FORMS if form is None else (form,)
        self._renderer, self._server = renderer, server
        self._loaded = LoadedEnvironment(spec, renderer, path)
        self._key = spec.identity
        self._timeout_seconds = timeout_seconds
        self.info = self._loaded.describe(checks_golds=True)
        self.environment: Environment = self._loaded.environment

    async def run(self, items: Sequence[int]) -> list[Trial]:
        """Runs the reference solution and the cheats of these items, and the model if there is a server."""
        self._environments = LoadedEnvironments([self._loaded], timeout_seconds=self._timeout_seconds)
        watching = asyncio.create_task(report_blocking(self._timeout_seconds))
        try:
            await self._environments.start()
            # References run first, one at a time, because a grader may have a deadline.
            references = [await self._reference(item) for item in items]
            others = await asyncio.gather(*map(self._others, items, references))
            return [trial for trials in (*references, *others) for trial in trials]
        except EnvironmentFailure as error:  # of a prompt
            raise UserError(str(error)) from error
        finally:
            watching.cancel()
            await self._environments.close()

    async def _reference(self, item: int) -> list[Trial]:
        """Returns the trial of the reference solution, or of the first form that is right. Empty without an answer."""
        sample = self.environment.get_sample(item)
        own = self.environment.solution(sample)
        if own and not (isinstance(own, list | tuple) and all(isinstance(text, str) for text in own)):
            raise UserError(f"solution() returned {own!r:.200}. Return a list of texts, one per turn.")
        answer = str(sample.answer or "")
        forms = [[form.replace("{}", answer)] for form in self._forms if answer or "{}" not in form]
        tried = [await self._try(item, REFERENCE, answers) for answers in ([own] if own else forms)]
        return ([trial for trial in tried if not trial.problem] or tried)[:1]

    async def _others(self, item: int, reference: list[Trial]) -> list[Trial]:
        cheats = self.environment.cheats(self.environment.get_sample(item))
        if not isinstance(cheats, dict) or not all(isinstance(text, str) for text in cheats.values()):
            raise UserError(f"cheats() returned {cheats!r:.200}. Return a dict of texts, by name.")
        if reference and list(reference[0].answers[-1:]) == [cheats.get(GOLD)]:
            del cheats[GOLD]
        others = {name: [answer] for name, answer in cheats.items()}
        others |= ({} if reference else {CANNED: [CANNED_ANSWER]}) | ({MODEL: []} if self._server else {})
        return await asyncio.gather(*(self._try(item, name, answers) for name, answers in others.items()))

    async def _try(self, item: int, name: str, answers: Sequence[str]) -> Trial:
        engine = ScriptedEngine(self._renderer, answers, self._server if name == MODEL else None)
        prompt = await self._environments.prepare(self._key, item)
        sampling = SamplingSettings(1.0, None, MAX_TOKENS, MAX_CONTEXT, self._renderer.stops)
        task = RolloutTask(
            f"{item}-{name}", item, 0, self.info.name, self._key, item, prompt.token_ids, (0, item, name),
        )  # fmt: skip
        slots = RequestSlotPool([MAX_CALLS])
        slots.set_up(0, True)
        rollout = Rollout(
            task, slot_key=item, slots=slots, engine_of=lambda _: engine,
            environments=self._environments, settings=RolloutSettings(sampling, True, 600.0, 0),
        )  # fmt: skip
        return Trial(item, name, answers, await rollout.run(), self.environment.reward_max)
