"""Local rollouts: one item of an environment, without an engine.

For authors of environments: messages are text, in the order of a training run (`take_turn`), and the answers come
from a function, such as a script or `ChatServer`, a client of OpenAI's chat API. Runs user code in this process and
without deadlines; a training run does neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from telescope.environments.base import (
    ChatMessage,
    Environment,
    MultiTurnEnvironment,
    RewardResult,
    RolloutState,
    SingleTurnEnvironment,
    TrajectoryStep,
    assistant_message,
    conversation,
)
from telescope.environments.context import Answer as AgentAnswer
from telescope.environments.context import Call, RolloutContext
from telescope.environments.parsers import answer_text, strip_think_tags
from telescope.environments.serialization import check_verdict, serialize_messages, serialize_score
from telescope.environments.user_code import settled
from telescope.errors import RunError, UserError


@dataclass(slots=True, frozen=True)
class Answer:
    """An answer of the model. `is_truncated`: it was cut off."""

    text: str
    is_truncated: bool = False


Answerer = Callable[[list[ChatMessage]], Answer | None]
"""Returns the next answer of a conversation, or None to end the rollout."""

NO_MORE_ANSWERS = "no_more_answers"
"""End reason of a rollout without further answers; the environment scores the trajectory so far."""


class NoAnswerError(UserError):
    """There was no answer to the first prompt of an item."""


@dataclass(slots=True, frozen=True)
class LocalRollout:
    """A finished rollout: messages, score, and the reason for its end. The score has the fields of `RewardRecord`."""

    messages: list[ChatMessage]
    score: dict[str, Any]
    num_turns: int
    end_reason: str | None


def roll_out_item(
    environment: Environment, index: int, answer: Answerer, on_message: Callable[[ChatMessage], None] = lambda _: None
) -> LocalRollout:
    """Runs the item at `index`. Calls `on_message` with every message as it is added.

    Raises what the environment's code or `answer` raises, `UserError` when there is no such item, and `NoAnswerError`.
    """
    if not 0 <= index < len(environment):
        raise UserError(f"There is no item {index}: the dataset has {len(environment)} items, counted from 0.")
    if environment.rollout is not None:
        return _finish(environment, _agent(environment, index, answer, on_message))
    if isinstance(environment, MultiTurnEnvironment):
        return _finish(environment, _several_turns(environment, index, answer, on_message))
    assert isinstance(environment, SingleTurnEnvironment)
    return _finish(environment, _single_turn(environment, index, answer, on_message))


@dataclass(slots=True, frozen=True)
class Reply:
    """The environment's reply to an answer.

    It has `done` with a `reason`, or the `added` messages and the next `conversation`.
    """

    done: bool
    reason: str | None = None
    added: list[ChatMessage] = field(default_factory=list)
    conversation: list[ChatMessage] = field(default_factory=list)


def take_turn(environment: MultiTurnEnvironment, state: RolloutState) -> Generator[Awaitable[Any], Any, Reply]:
    """Lets the environment respond to the last step of the trajectory. Fixes the order of its method calls."""
    if environment.checks_done_first:
        done, reason = check_verdict((yield from settled(environment.is_done(state))))
        if done:
            return Reply(True, reason)
    response = environment.env_response(conversation(state), state)
    if not isinstance(response, list):
        response = yield from settled(response)
    added = serialize_messages(response, "env_response")
    done, reason = check_verdict((yield from settled(environment.is_done(state))))
    if done:
        return Reply(True, reason)
    if state.trajectory[-1].is_truncated and not environment.continues_after_truncation:
        return Reply(True, "truncated")
    following = yield from settled(environment.get_next_prompt_messages(state, added))
    return Reply(False, added=added, conversation=serialize_messages(following, "get_next_prompt_messages"))


def _single_turn(
    environment: SingleTurnEnvironment, index: int, answer: Answerer, on_message: Callable[[ChatMessage], None]
) -> Generator[Awaitable[Any], Any, LocalRollout]:
    sample = environment.get_sample(index)
    messages = environment.build_messages(sample.prompt)
    for message in messages:
        on_message(message)
    given = answer(messages)
    if given is None:
        raise NoAnswerError("There is no answer to the prompt.")
    messages = [*messages, assistant_message(answer_text(given.text))]
    on_message(messages[-1])
    result: RewardResult = yield from settled(
        environment.compute_reward(messages[-1]["content"], sample, eos_token=environment.eos_token)
    )
    return LocalRollout(
        messages, serialize_score(result, for_eval=False), 1, "truncated" if given.is_truncated else None
    )


def _several_turns(
    environment: MultiTurnEnvironment, index: int, answer: Answerer, on_message: Callable[[ChatMessage], None]
) -> Generator[Awaitable[Any], Any, LocalRollout]:
    sample = environment.get_sample(index)
    state = yield from settled(environment.create_initial_state(sample))
    prompt = serialize_messages(environment.get_initial_prompt(sample), "get_initial_prompt")
    for message in prompt:
        on_message(message)
    everything = list(prompt)
    try:
        while True:
            given = answer(prompt)
            if given is None and not state.trajectory:
                raise NoAnswerError("There is no answer to the first prompt.")
            if given is None:
                reason: str | None = NO_MORE_ANSWERS
                break
            answer_message = assistant_message(answer_text(given.text))
            state.trajectory.append(TrajectoryStep(prompt, [answer_message], is_truncated=given.is_truncated))
            everything.append(answer_message)
            on_message(answer_message)
            reply = yield from take_turn(environment, state)
            if reply.done:
                reason = reply.reason
                break
            for message in reply.added:
                on_message(message)
            everything += reply.added
            prompt = reply.conversation
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        result = yield from settled(environment.compute_reward(state, eos_token=environment.eos_token))
        return LocalRollout(everything, serialize_score(result, for_eval=False), state.num_turns, state.stop_reason)
    finally:
        yield from settled(environment.end_rollout(state))


class _TextServices:
    """The `Services` of an agent that generates text and nothing else, without an engine."""

    api_key = ""

    def __init__(self, environment: Environment, answer: Answerer, on_message: Callable[[ChatMessage], None]) -> None:
        self._name, self._answer, self._on_message = environment.name, answer, on_message
        self.messages: list[ChatMessage] = []
        """Those of all calls. What a call repeats of the one before is there once."""
        self._last: list[ChatMessage] = []
        self.num_calls = 0

    async def complete(self, call: Call) -> AgentAnswer:
        if call.token_ids is not None or call.tools:
            raise self._refusal()
        asked, last = list(call.messages), self._last
        new = asked[len(last) :] if asked[: len(last)] == last else asked
        for message in new:
            self._on_message(message)
        given = self._answer(asked)
        if given is None:
            raise NoAnswerError(
                f"There is no answer to call {self.num_calls + 1} of the agent: give one `--answer` for each call."
            )
        text = strip_think_tags(answer_text(given.text)).strip()
        answer = AgentAnswer(text, finish_reason="length" if given.is_truncated else "stop", raw_text=given.text)
        self._on_message(answer.message)
        self.messages += [*new, answer.message]
        self._last, self.num_calls = [*asked, answer.message], self.num_calls + 1
        return answer

    async def judge(self, prompt: str, schema: Mapping[str, Any] | None, model: str | None) -> Any:
        raise self._refusal()

    async def sandbox(self, image: str | None) -> Any:
        raise self._refusal()

    def base_url(self, chat: str) -> str:
        raise self._refusal()

    def _refusal(self) -> UserError:
        return UserError(
            "The agent uses more than text (tools, token ids, a judge, a sandbox or its endpoint). Run `telescope envs "
            f"check {self._name} --model FOLDER`, with --url of a server of vLLM for a model's answers."
        )


def _agent(
    environment: Environment, index: int, answer: Answerer, on_message: Callable[[ChatMessage], None]
) -> Generator[Awaitable[Any], Any, LocalRollout]:
    assert environment.rollout is not None
    services = _TextServices(environment, answer, on_message)
    context = RolloutContext(services, time.monotonic() + environment.rollout_timeout_seconds)
    result = yield from settled(environment.rollout(environment.get_sample(index), context))
    if isinstance(result, RewardResult):
        result.sample_metrics = {**context.metrics, **result.sample_metrics}
    return LocalRollout(services.messages, serialize_score(result, for_eval=False), services.num_calls, None)


def _finish(environment: Environment, steps: Generator[Awaitable[Any], Any, LocalRollout]) -> LocalRollout:
    """Takes all steps as a worker does, between the environment's resources being prepared and closed.

    Awaitables run in a new event loop, synchronous code outside it.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(environment.prepare_resources())
        resume: Callable[[], Awaitable[Any]] = partial(next, steps)
        while True:
            try:
                waits_for = resume()
            except StopIteration as end:
                rollout: LocalRollout = end.value
                return rollout
            try:
                result = loop.run_until_complete(asyncio.ensure_future(waits_for, loop=loop))
                resume = partial(steps.send, result)
            except Exception as error:
                resume = partial(steps.throw, error)
    finally:
        loop.run_until_complete(environment.close_resources())
        asyncio.set_event_loop(None)
        loop.close()


API_KEY_VARIABLE = "OPENAI_API_KEY"


class ChatServer:
    """A server at `url` (with or without `/v1`). `model` defaults to the first that it serves.

    `key` defaults to that of the environment. `max_tokens` None leaves the limit to the server. `stops` are parameters
    of a request that say what ends an answer.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        max_tokens: int | None = 1024,
        temperature: float = 1.0,
        stops: Mapping[str, Any] | None = None,
        timeout_seconds: float = 300.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}; write it with http:// or https://.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key = key or os.environ.get(API_KEY_VARIABLE)
        self._options = {"temperature": temperature, **(stops or {})}
        self._options |= {} if max_tokens is None else {"max_tokens": max_tokens}
        self._timeout_seconds = timeout_seconds
        if model is None:
            listed = self._ask("/models", None)
            try:
                model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise RunError(f"{self._base} lists no model; name one with --model") from None
        self.model = model

    def __call__(self, messages: list[ChatMessage]) -> Answer:
        """Returns the next message of the conversation. Raises `RunError` when the server returns none."""
        answer = self._ask("/chat/completions", {"model": self.model, "messages": messages, **self._options})
        try:
            choice = answer["choices"][0]
            return Answer(choice["message"].get("content") or "", choice.get("finish_reason") == "length")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RunError(f"{self._base} returned a malformed answer: {json.dumps(answer)[:300]}") from None

    def complete(self, prompt: list[int], stop_token_ids: list[int], stop: list[str]) -> tuple[str, bool]:
        """Returns what a server of vLLM appends to token ids, and whether the model ended it."""
        body = {"prompt": prompt, "stop_token_ids": stop_token_ids, "stop": stop, "skip_special_tokens": False}
        choice = self._ask("/completions", {"model": self.model, **self._options, **body})["choices"][0]
        return choice["text"], choice["finish_reason"] == "stop"

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_seconds) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:300]
            raise RunError(f"{self._base}{path} answered {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise RunError(f"{self._base}{path} cannot be reached: {error}") from error
