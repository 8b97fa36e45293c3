"""Multi-turn rollouts of one process.

Owns every `RolloutState` of the process, from `create_initial_state` to the reward, and the order in which the
environment's methods are called. A state is dropped, after the environment's `end_rollout`, when its rollout is scored,
when the environment's code fails, or when the driver ends it.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from telescope.environments.base import (
    ChatMessage,
    MultiTurnEnvironment,
    RolloutState,
    Sample,
    TrajectoryStep,
    assistant_message,
    wrapped_environment,
)
from telescope.environments.local_rollout import take_turn
from telescope.environments.parsers import answer_text
from telescope.environments.serialization import (
    MalformedResultError,
    serialize_score,
    serialize_tool_records,
)
from telescope.environments.types import CONTEXT_EXHAUSTED, ROLLOUT_ERROR, Advance, RewardRecord
from telescope.environments.user_code import Steps, error_text, settled
from telescope.rollout.rendering import Dialogue, Renderer


@dataclass(slots=True)
class _Conversation:
    """An open rollout. `prompt` is the conversation that the model answers next, and `prompt_ids` its tokens."""

    environment: Any
    state: RolloutState
    dialogue: Dialogue
    prompt: list[ChatMessage]
    prompt_ids: list[int]
    running: bool = False
    ended: bool = False
    """The driver ended it while a step was waiting; that step cleans up when it is over."""


@dataclass(slots=True, frozen=True)
class Completion:
    """What the model has sampled in one turn: token ids [N] with the engine's logprobs [N].

    A next prompt of `max_context` tokens or more ends the rollout. `for_eval` asks for the metrics of an evaluation.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str
    max_context: int | None = None
    for_eval: bool = False


class Conversations:
    """The open rollouts of one process, by their ids."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer
        self._open: dict[str, _Conversation] = {}

    def multi_turn_environment(self, environment: Any) -> MultiTurnEnvironment:
        """Returns the environment itself, or the one that an eval wraps."""
        found = wrapped_environment(environment)
        assert isinstance(found, MultiTurnEnvironment)
        return found

    def begin(
        self, rollout: str, environment: Any, sample: Sample, prompt: list[ChatMessage], *, interleaved: bool
    ) -> Steps[list[int]]:
        """Creates the state of a new rollout, in steps. Returns the token ids of its first prompt."""
        if rollout in self._open:
            raise ValueError(f"the rollout {rollout!r} is already open")
        assert self._renderer is not None, "a pool without a renderer prepares no prompts"
        state = yield from settled(self.multi_turn_environment(environment).create_initial_state(sample))
        if not isinstance(state, RolloutState):
            raise MalformedResultError(f"create_initial_state returned {type(state).__name__}, not a RolloutState")
        found = self.multi_turn_environment(environment)
        opens, tools = found.add_thinking_prefix, found.template_tools
        dialogue = Dialogue(self._renderer, interleaved=interleaved, thinking_prefix=opens, tools=tools)
        ids = dialogue.begin(prompt)
        self._open[rollout] = _Conversation(environment, state, dialogue, prompt, ids)
        return ids

    def respond(self, rollout: str, completion: Completion) -> Steps[Advance]:
        """Passes a completion to the environment. Returns the next conversation, or the reward."""
        record = self._open[rollout]
        record.running = True
        over = True
        try:
            advance = yield from self._turn(record, completion)
            over = advance.done or record.ended
            return advance
        except Exception as error:
            record.state.error, record.state.stop_reason = error_text(error), ROLLOUT_ERROR
            raise
        finally:
            record.running = False
            if over:
                yield from self._close(rollout)

    def end(self, rollout: str) -> Steps[None]:
        """Ends a rollout for the driver. Ignores a rollout that is already over."""
        record = self._open.get(rollout)
        if record is None:
            return
        if record.running:
            record.ended = True
        else:
            yield from self._close(rollout)

    def end_all(self) -> Steps[None]:
        """Ends every open rollout, before the process exits."""
        for rollout in list(self._open):
            yield from self._close(rollout)

    def _close(self, rollout: str) -> Steps[None]:
        record = self._open.pop(rollout, None)
        if record is None:
            return
        try:
            yield from settled(self.multi_turn_environment(record.environment).end_rollout(record.state))
        except BaseException:  # `sys.exit` too: the rollout's reward is already known
            traceback.print_exc()

    def _turn(self, record: _Conversation, completion: Completion) -> Steps[Advance]:
        environment, state = self.multi_turn_environment(record.environment), record.state
        cut = completion.stop_reason == "stop" and not environment.keeps_eos_token
        ids = completion.token_ids
        assert self._renderer is not None, "a pool without a renderer decodes no completions"
        text = self._renderer.decode(ids, cut_end_token=cut)
        truncated = completion.stop_reason != "stop"
        dialogue = record.dialogue
        answer = answer_text(dialogue.opening + text, dialogue.opened)
        said = [assistant_message(answer)]
        step = TrajectoryStep(record.prompt, said, record.prompt_ids, ids, completion.logprobs, truncated)
        state.trajectory.append(step)
        state.tool_records = []
        reply = yield from take_turn(environment, state)
        if reply.done:
            return (yield from self._score(record, completion.for_eval, text, reply.reason))
        messages = reply.conversation
        extension = record.dialogue.extend(text, ids, messages, ended=not truncated)
        if extension.restarts:
            record.prompt_ids = extension.token_ids
        else:
            record.prompt_ids = [*record.prompt_ids, *ids, *extension.token_ids]
        if completion.max_context is not None and len(record.prompt_ids) >= completion.max_context:
            return (yield from self._score(record, completion.for_eval, text, CONTEXT_EXHAUSTED))
        record.prompt = messages
        return Advance(
            False,
            extension.token_ids,
            text,
            None,
            messages=reply.added,
            restarts=extension.restarts,
            divergence=extension.divergence,
            tool_calls=serialize_tool_records(state.tool_records),
        )

    def _score(self, record: _Conversation, for_eval: bool, text: str, reason: str | None) -> Steps[Advance]:
        environment, state = record.environment, record.state
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        if for_eval:
            method = getattr(environment, "compute_rollout_metrics", None) or environment.compute_eval_metrics
        else:
            method = environment.compute_reward
        score = serialize_score((yield from settled(method(state, eos_token=environment.eos_token))), for_eval)
        calls = serialize_tool_records(state.tool_records)
        return Advance(True, [], text, RewardRecord(**score), end_reason=state.stop_reason, tool_calls=calls)
