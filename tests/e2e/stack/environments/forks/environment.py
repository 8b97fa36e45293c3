"""Puzzles that an agent asks in one conversation, a branch of it, a chat of its own and through the endpoint.

It notes what it saw of each answer, for comparison with what is trained.
"""

from __future__ import annotations

import asyncio
from typing import Any

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import RolloutContext
from telescope.environments.countdown.environment import CountdownEnvironment

REQUIRED_PACKAGES: list[str] = []


class Forks(CountdownEnvironment):
    """The reward is that of the first answer, and the chat's that of its own."""

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:  # type: ignore[override]
        notes: list[dict[str, Any]] = []

        def note(messages: list[Any], ids: Any, logprobs: Any) -> None:
            notes.append({"messages": messages, "token_ids": list(ids), "logprobs": list(logprobs)})

        async def ask(chat: Any, messages: list[Any]) -> Any:
            answer = await chat.generate(messages)
            note(messages, answer.token_ids, answer.logprobs)
            return answer

        question = {"role": "user", "content": sample.prompt}
        first = await ask(context, [question])
        await asyncio.sleep(1)  # so that weights change in the middle of many rollouts
        longer = [question, first.message, question]
        second = await ask(context, longer)
        other = self.question(sample.metadata["numbers"][::-1], sample.metadata["target"])
        await ask(context, [question, first.message, {"role": "user", "content": other}])
        with context.chat("checker") as checker:
            checked = await ask(checker, [question])
            checker.reward = self.compute_reward(checked.text, sample).total_reward
        longest = [*longer, second.message, question]
        response = await context.openai().chat.completions.create(model="policy", messages=longest, logprobs=True)
        seen = response.choices[0].logprobs.content
        note(longest, [int(token.token.removeprefix("token_id:")) for token in seen], [t.logprob for t in seen])
        result = self.compute_reward(first.text, sample)
        result.info_turns = [{"seen": entry} for entry in notes]
        return result
