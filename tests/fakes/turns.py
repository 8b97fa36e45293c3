"""The real turn loop over fakes of environments that reply by script."""

from __future__ import annotations

from typing import Any

from telescope.environments.types import Advance, RewardRecord
from telescope.rollout.sample import Rollout
from telescope.rollout.trajectory import Turn
from telescope.rollout.turns import take_turns


class ScriptedTurns:
    """Environments that score an answer with `advance`, or hold a conversation with `begin`, `respond` and `end`.

    The latter if they have them, unless `turns` is False.
    """

    async def roll_out(self, rollout: Rollout) -> RewardRecord:
        return await take_turns(rollout, _Scripted(self, rollout))


class _Scripted:
    """One rollout. Its name is its sample's, and how often it began before."""

    def __init__(self, environments: Any, rollout: Rollout) -> None:
        self._environments, self._rollout, self._task = environments, rollout, rollout.task
        self.has_state = getattr(environments, "turns", hasattr(environments, "begin"))
        self._name = f"{rollout.task.sample_id}.{rollout.trajectory.num_infrastructure_retries}"

    async def begin(self) -> list[int]:
        if not self.has_state:
            return self._task.prompt_token_ids
        first: list[int] = await self._environments.begin(self._name, self._task.environment_key, self._task.item_index)
        return first

    async def respond(self, turn: Turn) -> Advance:
        name: tuple[Any, ...] = (self._name,)
        respond = self._environments.respond if self.has_state else self._environments.advance
        if not self.has_state:
            name = self._task.environment_key, self._task.item_index
        reply: Advance = await respond(*name, turn, for_eval=self._rollout.settings.for_eval)
        return reply

    async def end(self) -> None:
        if self.has_state:
            self._environments.end(self._name)
