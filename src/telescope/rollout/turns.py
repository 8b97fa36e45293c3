"""The default `rollout` of an environment: one completion, or completions and replies until the environment is done.

`take_turns` owns the loop. A `Conversation` owns the environment's side: its state, the order in which its methods are
called, and the token ids that its replies add. A state ends with `end_rollout` when its rollout was scored, failed or
was cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable
from typing import Any, Protocol

from telescope.environments.base import ChatMessage, RolloutState, TrajectoryStep, multi_turn_environment
from telescope.environments.local_rollout import take_turn
from telescope.environments.parsers import UnfinishedReasoning, answer_text, opening_tag
from telescope.environments.records import assistant_message
from telescope.environments.serialization import serialize_score, serialize_tool_records
from telescope.environments.types import CONTEXT_EXHAUSTED, ROLLOUT_ERROR, Advance, RewardRecord
from telescope.environments.user_code import Steps, error_text, settled
from telescope.errors import EnvironmentFailure, InfrastructureError, MalformedResultError
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Dialogue
from telescope.rollout.sample import Rollout
from telescope.rollout.trajectory import Turn
from telescope.rollout.user_thread import UserThread

logger = logging.getLogger(__name__)

TAG_TOKENS = 64
"""Tokens at the end of a prompt that contain any tag that opens reasoning."""


class Conversation(Protocol):
    """The environment's side of a rollout in turns."""

    has_state: bool
    """Whether an infrastructure failure loses its state. Without state it replies to the same answer again."""

    async def begin(self) -> list[int]:
        """Returns the token ids of the first prompt."""

    async def respond(self, turn: Turn) -> Advance:
        """Passes a completion to the environment. Returns its replies, or the score.

        Sets the turn's text and tool calls, which are recorded even if the environment fails.
        """

    async def end(self) -> None:
        """Drops the state. Called once."""


async def take_turns(rollout: Rollout, conversation: Conversation) -> RewardRecord:
    """Samples completions until the environment is done. Returns the score.

    Raises `EnvironmentFailure`, and `InfrastructureError` when the state of the conversation is lost.
    """
    trajectory, settings = rollout.trajectory, rollout.settings
    try:
        prompt_token_ids = added_token_ids = await conversation.begin()
        if prompt_token_ids != rollout.task.prompt_token_ids:
            raise EnvironmentFailure(
                "get_initial_prompt returned different prompts for the same item; the samples of a group share one "
                "prompt, so it must be deterministic"
            )
        parent: int | None = None
        routes_start, reply = 0, None
        while True:
            shown: list[ChatMessage] = [] if reply is None else reply.messages
            index = await rollout.sample(
                prompt_token_ids, added_token_ids=added_token_ids, parent=parent, routes_start=routes_start,
                keeps_slot=not settings.free_lane_after_generation,
                replies=[tuple(str(m.get(key) or "") for key in ("role", "content", "turn_type")) for m in shown],
                divergence=None if reply is None else reply.divergence,
                renders_again=reply is not None and reply.restarts,
            )  # fmt: skip
            turn = trajectory.turns[index]
            reply = await _reply(rollout, conversation, turn)
            if reply.reward is not None:
                trajectory.end_reason = reply.end_reason
                return reply.reward
            added_token_ids = reply.append_token_ids
            parent = None if reply.restarts else index
            before = [] if reply.restarts else [*prompt_token_ids, *turn.generation.token_ids_N.tolist()]
            prompt_token_ids = before + added_token_ids
            # Routes are known up to the token before the last sampled one.
            routes_start = max(len(before) - 1, 0) if turn.generation.routes_MXK is not None else 0
    finally:
        rollout.release()
        await conversation.end()


async def _reply(rollout: Rollout, conversation: Conversation, turn: Turn) -> Advance:
    while True:
        try:
            return await conversation.respond(turn)
        except InfrastructureError:
            if conversation.has_state or not rollout.may_retry():
                raise


class SingleTurn:
    """A conversation with one completion, which the environment scores."""

    has_state = False

    def __init__(self, rollout: Rollout, loaded: LoadedEnvironment, thread: UserThread) -> None:
        self._rollout, self._loaded, self._thread = rollout, loaded, thread

    async def begin(self) -> list[int]:
        return self._rollout.task.prompt_token_ids

    async def respond(self, turn: Turn) -> Advance:
        method = "compute_eval_metrics" if self._rollout.settings.for_eval else "compute_reward"
        return await self._thread.run(self._score(method, turn), f"{self._rollout.label}: {method}")

    async def end(self) -> None:
        return None

    def _score(self, method: str, turn: Turn) -> Steps[Advance]:
        """Decodes the completion and has the environment score it."""
        generation, environment, renderer = turn.generation, self._loaded.environment, self._loaded.renderer
        assert renderer is not None
        cut = generation.finish_reason == "stop" and not environment.keeps_eos_token
        turn.text = text = renderer.decode(generation.token_ids_N.tolist(), cut_end_token=cut)
        end_of_prompt = self._rollout.task.prompt_token_ids[-TAG_TOKENS:]
        opened = opening_tag(renderer.decode(end_of_prompt, cut_end_token=False))
        completion = answer_text(text, opened)
        if isinstance(completion, UnfinishedReasoning):
            completion = UnfinishedReasoning(opened + text)  # the environment's code can tell that it is reasoning
        sample = environment.get_sample(self._rollout.task.item_index)
        scored = getattr(environment, method)(completion, sample, eos_token=environment.eos_token)
        score = serialize_score((yield from settled(scored)), self._rollout.settings.for_eval)
        return Advance([], RewardRecord(**score))


class MultiTurn:
    """A conversation with a `MultiTurnEnvironment`, or with the one that an eval wraps."""

    has_state = True

    def __init__(self, rollout: Rollout, loaded: LoadedEnvironment, thread: UserThread) -> None:
        assert loaded.renderer is not None
        self._rollout, self._loaded, self._thread = rollout, loaded, thread
        self._owner = loaded.environment
        self._environment = found = multi_turn_environment(self._owner)
        self._renderer = loaded.renderer
        self._label = f"{rollout.label}, rollout {rollout.task.sample_id!r}"
        self._state: RolloutState | None = None
        self._prompt: list[ChatMessage] = []
        """The conversation that the model answers next, and its tokens."""
        self._prompt_ids: list[int] = []
        self._dialogue = Dialogue(
            loaded.renderer, interleaved=rollout.settings.interleaved, thinking_prefix=found.add_thinking_prefix
        )

    async def begin(self) -> list[int]:
        return await self._thread.run(self._begin(), f"{self._label}: begin")

    async def respond(self, turn: Turn) -> Advance:
        return await self._thread.run(self._respond(turn), f"{self._label}: respond")

    async def end(self) -> None:
        try:  # in a task of its own, so that a cancelled rollout ends as well
            await asyncio.shield(self._thread.start(self._end(), f"{self._label}: end"))
        except (EnvironmentFailure, InfrastructureError) as error:  # the score is known
            logger.warning("%s", error)

    def _begin(self) -> Steps[list[int]]:
        sample = self._owner.get_sample(self._rollout.task.item_index)
        self._prompt = self._loaded.first_messages(sample)
        made = self._environment.create_initial_state(sample)
        if inspect.isawaitable(made):
            yield self._keep_later(made)
        else:
            self._keep(made)
        self._dialogue.tools = self._environment.template_tools
        self._prompt_ids = self._dialogue.begin(self._prompt)
        return self._prompt_ids

    async def _keep_later(self, made: Awaitable[Any]) -> None:
        self._keep(await made)  # in one step, so that no cancellation loses a state that was created

    def _keep(self, state: Any) -> None:
        if not isinstance(state, RolloutState):
            raise MalformedResultError(f"create_initial_state returned {type(state).__name__}, not a RolloutState")
        self._state = state

    def _respond(self, turn: Turn) -> Steps[Advance]:
        assert self._state is not None
        self._state.tool_records = []
        try:
            return (yield from self._turn(self._state, turn))
        except Exception as error:
            self._state.error, self._state.stop_reason = error_text(error), ROLLOUT_ERROR
            raise
        finally:
            turn.tool_calls = serialize_tool_records(self._state.tool_records)

    def _turn(self, state: RolloutState, turn: Turn) -> Steps[Advance]:
        dialogue, generation = self._dialogue, turn.generation
        ids = generation.token_ids_N.tolist()
        ended = generation.finish_reason == "stop"
        turn.text = text = self._renderer.decode(ids, cut_end_token=ended and not self._environment.keeps_eos_token)
        said = [assistant_message(answer_text(dialogue.opening + text, dialogue.opened))]
        logprobs = generation.logprobs_N.tolist()
        state.trajectory.append(TrajectoryStep(self._prompt, said, self._prompt_ids, ids, logprobs, not ended))
        reply = yield from take_turn(self._environment, state)
        if reply.done:
            return (yield from self._score(state, reply.reason))
        self._prompt = reply.conversation
        extension = dialogue.extend(text, ids, self._prompt, ended=ended)
        before = [] if extension.restarts else [*self._prompt_ids, *ids]
        self._prompt_ids = [*before, *extension.token_ids]
        if len(self._prompt_ids) >= self._rollout.settings.sampling.max_context:
            return (yield from self._score(state, CONTEXT_EXHAUSTED))
        return Advance(
            extension.token_ids, messages=reply.added, restarts=extension.restarts, divergence=extension.divergence
        )

    def _score(self, state: RolloutState, reason: str | None) -> Steps[Advance]:
        owner, for_eval = self._owner, self._rollout.settings.for_eval
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        method = owner.compute_reward
        if for_eval:
            method = getattr(owner, "compute_rollout_metrics", None) or owner.compute_eval_metrics
        score = serialize_score((yield from settled(method(state, eos_token=owner.eos_token))), for_eval)
        return Advance([], RewardRecord(**score), end_reason=state.stop_reason)

    def _end(self) -> Steps[None]:
        if self._state is not None:
            try:
                yield from settled(self._environment.end_rollout(self._state))
            except BaseException:  # `sys.exit` too: the rollout's reward is already known
                traceback.print_exc()
