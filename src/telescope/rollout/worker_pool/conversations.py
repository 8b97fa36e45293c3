"""Multi-turn rollouts inside a worker process.

Owns every `RolloutState` of the process, from `create_initial_state` to the reward, and the order in which the
environment's methods are called. A state is dropped, after the environment's `end_rollout`, when its rollout is scored,
when the environment's code fails, or when the driver ends it.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Generator
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
from telescope.environments.types import CONTEXT_EXHAUSTED, ROLLOUT_ERROR
from telescope.environments.user_code import Steps, error_text, settled
from telescope.rollout.rendering import Dialogue, Renderer
from telescope.rollout.worker_pool.messages import pack_ids, unpack_floats, unpack_ids


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


class Conversations:
    """The open rollouts of one process, by the pool's keys."""

    def __init__(self, renderer: Renderer | None) -> None:
        self._renderer = renderer
        self._open: dict[int, _Conversation] = {}

    def multi_turn_environment(self, environment: Any) -> MultiTurnEnvironment:
        """Returns the environment itself, or the one that an eval wraps."""
        found = wrapped_environment(environment)
        assert isinstance(found, MultiTurnEnvironment)
        return found

    def begin(
        self, rollout: int, environment: Any, sample: Sample, prompt: list[ChatMessage], *, interleaved: bool
    ) -> Generator[Awaitable[Any], Any, list[int]]:
        """Creates the state of a new rollout, in steps. Returns the token ids of its first prompt."""
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

    def respond(self, header: dict[str, Any], blob: bytes) -> Steps:
        """Passes a completion to the environment. Returns the next conversation, or the reward."""
        rollout = header["rollout"]
        record = self._open[rollout]
        record.running = True
        over = True
        try:
            fields, ids = yield from self._turn(record, header, blob)
            over = fields["done"] or record.ended
            return fields, pack_ids(ids)
        except Exception as error:
            record.state.error, record.state.stop_reason = error_text(error), ROLLOUT_ERROR
            raise
        finally:
            record.running = False
            if over:
                yield from self._close(rollout)

    def end(self, rollout: int) -> Generator[Awaitable[Any], Any, None]:
        """Ends a rollout for the driver. Ignores a rollout that is already over."""
        record = self._open.get(rollout)
        if record is None:
            return
        if record.running:
            record.ended = True
        else:
            yield from self._close(rollout)

    def end_all(self) -> Generator[Awaitable[Any], Any, None]:
        """Ends every open rollout, before the process exits."""
        for rollout in list(self._open):
            yield from self._close(rollout)

    def _close(self, rollout: int) -> Generator[Awaitable[Any], Any, None]:
        record = self._open.pop(rollout, None)
        if record is None:
            return
        try:
            yield from settled(self.multi_turn_environment(record.environment).end_rollout(record.state))
        except BaseException:  # `sys.exit` too: the rollout's reward is already known
            traceback.print_exc()

    def _turn(
        self, record: _Conversation, header: dict[str, Any], blob: bytes
    ) -> Generator[Awaitable[Any], Any, tuple[dict[str, Any], list[int]]]:
        """Returns the answer's fields and the token ids before the next turn."""
        environment, state = self.multi_turn_environment(record.environment), record.state
        cut = header["stop_reason"] == "stop" and not environment.keeps_eos_token
        num_ids = header["num_ids"]
        ids = unpack_ids(blob[: 4 * num_ids])
        assert self._renderer is not None, "a pool without a renderer decodes no completions"
        text = self._renderer.decode(ids, cut_end_token=cut)
        truncated = header["stop_reason"] != "stop"
        dialogue = record.dialogue
        answer = answer_text(dialogue.opening + text, dialogue.opened)
        completion = [assistant_message(answer)]
        logprobs = unpack_floats(blob[4 * num_ids :])
        state.trajectory.append(TrajectoryStep(record.prompt, completion, record.prompt_ids, ids, logprobs, truncated))
        state.tool_records = []
        reply = yield from take_turn(environment, state)
        if reply.done:
            return (yield from self._score(record, header["for_eval"], text, reply.reason)), []
        messages = reply.conversation
        extension = record.dialogue.extend(text, ids, messages, ended=not truncated)
        if extension.restarts:
            record.prompt_ids = extension.token_ids
        else:
            record.prompt_ids = [*record.prompt_ids, *ids, *extension.token_ids]
        if header["max_context"] is not None and len(record.prompt_ids) >= header["max_context"]:
            return (yield from self._score(record, header["for_eval"], text, CONTEXT_EXHAUSTED)), []
        record.prompt = messages
        fields = {
            "done": False,
            "completion_text": text,
            "messages": reply.added,
            "restarts": extension.restarts,
            "divergence": extension.divergence,
            "tool_calls": serialize_tool_records(state.tool_records),
        }
        return fields, extension.token_ids

    def _score(
        self, record: _Conversation, for_eval: bool, text: str, reason: str | None
    ) -> Generator[Awaitable[Any], Any, dict[str, Any]]:
        environment, state = record.environment, record.state
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        if for_eval:
            method = getattr(environment, "compute_rollout_metrics", None) or environment.compute_eval_metrics
        else:
            method = environment.compute_reward
        score = serialize_score((yield from settled(method(state, eos_token=environment.eos_token))), for_eval)
        calls = serialize_tool_records(state.tool_records)
        ended = {"done": True, "end_reason": state.stop_reason}
        return {**ended, "completion_text": text, "reward": score, "tool_calls": calls}
