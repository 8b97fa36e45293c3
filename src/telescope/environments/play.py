"""Playing one item of an environment without an engine: messages in, answers out, and the score at the end.

For people who write an environment: what is said is text, in the order in which a run would say it (`conversations`),
and the answers come from a function, which may ask a model server or read a script. Runs user code in this process and
without deadlines; a training run does neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

from telescope.environments.base import (
    ChatMessage,
    Environment,
    MultiTurnEnvironment,
    RewardResult,
    SingleTurnEnvironment,
    TrajectoryStep,
)
from telescope.environments.conversations import take_turn
from telescope.environments.plain import plain_messages, plain_score
from telescope.environments.steps import settled
from telescope.errors import UserError


@dataclass(slots=True, frozen=True)
class Answer:
    """What the player said. `is_truncated`: it was cut off."""

    text: str
    is_truncated: bool = False


Answerer = Callable[[list[ChatMessage]], Answer | None]
"""Says what comes next in a conversation; None when it says nothing any more, which ends the game."""

NO_MORE_ANSWERS = "no_more_answers"
"""End reason of a game that the player left; the environment scores what there is."""


class NobodyAnswers(UserError):
    """The player had nothing to say to the first prompt of an item, so that there is nothing to score."""


@dataclass(slots=True, frozen=True)
class Played:
    """A rollout that is over: all that was said, the score as plain values (`RewardRecord`), and why it ended."""

    messages: list[ChatMessage]
    score: dict[str, Any]
    num_turns: int
    end_reason: str | None


def play_item(
    environment: Environment, index: int, answer: Answerer, said: Callable[[ChatMessage], None] = lambda _: None
) -> Played:
    """Play the item at `index`. `said` is called with every message as it is said.

    Raises what the environment's code or `answer` raises, `UserError` when there is no such item, and `NobodyAnswers`.
    """
    if not 0 <= index < len(environment):
        raise UserError(f"There is no item {index}: the dataset has {len(environment)}, counted from 0.")
    if isinstance(environment, MultiTurnEnvironment):
        return _finish(_several_turns(environment, index, answer, said))
    assert isinstance(environment, SingleTurnEnvironment)
    return _finish(_single_turn(environment, index, answer, said))


def _single_turn(
    environment: SingleTurnEnvironment, index: int, answer: Answerer, said: Callable[[ChatMessage], None]
) -> Generator[Awaitable[Any], Any, Played]:
    sample = environment.get_sample(index)
    messages = environment.build_messages(sample.prompt)
    for message in messages:
        said(message)
    given = answer(messages)
    if given is None:
        raise NobodyAnswers("There is no answer to the prompt.")
    messages = [*messages, {"role": "assistant", "content": given.text}]
    said(messages[-1])
    result: RewardResult = yield from settled(environment.compute_reward(given.text, sample, eos_token=""))
    return Played(messages, plain_score(result, for_eval=False), 1, "truncated" if given.is_truncated else None)


def _several_turns(
    environment: MultiTurnEnvironment, index: int, answer: Answerer, said: Callable[[ChatMessage], None]
) -> Generator[Awaitable[Any], Any, Played]:
    sample = environment.get_sample(index)
    state = yield from settled(environment.create_initial_state(sample))
    prompt = plain_messages(environment.get_initial_prompt(sample), "get_initial_prompt")
    for message in prompt:
        said(message)
    everything = list(prompt)
    try:
        while True:
            given = answer(prompt)
            if given is None and not state.trajectory:
                raise NobodyAnswers("There is no answer to the first prompt.")
            if given is None:
                reason: str | None = NO_MORE_ANSWERS
                break
            state.trajectory.append(TrajectoryStep(prompt, given.text, is_truncated=given.is_truncated))
            everything.append({"role": "assistant", "content": given.text})
            said(everything[-1])
            reply = yield from take_turn(environment, state)
            if reply.done:
                reason = reply.reason
                break
            for message in reply.added:
                said(message)
            everything += reply.added
            prompt = reply.conversation
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        result = yield from settled(environment.compute_reward(state, eos_token=""))
        return Played(everything, plain_score(result, for_eval=False), state.num_turns, state.stop_reason)
    finally:
        yield from settled(environment.end_rollout(state))


def _finish(steps: Generator[Awaitable[Any], Any, Played]) -> Played:
    """Take all steps: awaitables in an event loop of their own, plain code outside of it, as a worker does."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        resume: Callable[[], Awaitable[Any]] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                waits_for = resume()
            except StopIteration as end:
                played: Played = end.value
                return played
            resume = _resumed(steps, loop, waits_for)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _resumed(
    steps: Generator[Awaitable[Any], Any, Played], loop: asyncio.AbstractEventLoop, waits_for: Awaitable[Any]
) -> Callable[[], Awaitable[Any]]:
    try:
        result = loop.run_until_complete(asyncio.ensure_future(waits_for, loop=loop))
    except Exception as error:
        raised = error
        return lambda: steps.throw(raised)
    return lambda: steps.send(result)
