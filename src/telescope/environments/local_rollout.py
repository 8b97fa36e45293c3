"""Runs one item of an environment locally, without an engine.

For authors of environments: messages are text, in the order of a training run (`take_turn`), and the answers come from
a function, such as a script or `ChatServer`, a client of OpenAI's chat API. Runs user code in this process and without
deadlines, unlike a training run.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NoReturn

from telescope.environments.base import (
    ChatMessage,
    Environment,
    MultiTurnEnvironment,
    RewardResult,
    RolloutState,
    Sample,
    TrajectoryStep,
    is_agent,
)
from telescope.environments.context import Answer as AgentAnswer
from telescope.environments.context import Call, RolloutContext
from telescope.environments.parsers import answer_text, strip_think_tags
from telescope.environments.records import assistant_message, conversation
from telescope.environments.serialization import (
    check_verdict,
    serialize_messages,
    serialize_score,
)
from telescope.environments.user_code import maybe_await, settled, take_steps
from telescope.errors import MalformedResultError, RunError, UserError


@dataclass(slots=True, frozen=True)
class Answer:
    """An answer of the model. `is_truncated`: the answer was cut off."""

    text: str
    is_truncated: bool = False


Answerer = Callable[[list[ChatMessage]], Answer | None]
"""Returns the next answer of a conversation, or None to end the rollout."""

NO_MORE_ANSWERS = "no_more_answers"
"""End reason of a rollout without further answers; the environment scores the trajectory so far."""


class NoAnswerError(UserError):
    """The first prompt of an item, or a call of an agent, got no answer."""


@dataclass(slots=True, frozen=True)
class LocalRollout:
    """A finished rollout: messages, score, and why it ended. The score has the fields of `RewardRecord`."""

    messages: list[ChatMessage]
    score: dict[str, Any]
    num_turns: int
    end_reason: str | None


def roll_out_item(
    environment: Environment, index: int, answer: Answerer, on_message: Callable[[ChatMessage], None] = lambda _: None
) -> LocalRollout:
    """Runs the item at `index`. Calls `on_message` with each message as it is added.

    Raises what the environment's code or `answer` raises, `UserError` when there is no such item, and `NoAnswerError`.
    """
    if not 0 <= index < len(environment):
        raise UserError(f"There is no item {index}: the dataset has {len(environment)} items, counted from 0.")
    transcript = _Transcript(answer, on_message)
    run = _single_turn
    if is_agent(environment):
        run = _agent
    elif isinstance(environment, MultiTurnEnvironment):
        run = _several_turns
    steps = run(environment, environment.get_sample(index), transcript)
    with asyncio.Runner() as loop:  # for awaitables; synchronous code runs outside of it, as in a worker
        try:
            loop.run(environment.prepare_resources())
            result, end_reason = take_steps(steps, lambda value: loop.run(maybe_await(value), context=copy_context()))
        finally:
            loop.run(environment.close_resources())
    score = serialize_score(result, for_eval=False, method="rollout" if is_agent(environment) else None)
    return LocalRollout(transcript.messages, score, transcript.num_answers, end_reason)


@dataclass(slots=True, frozen=True)
class Reply:
    """The environment's reply to an answer.

    It has either `done` with a `reason`, or the `added` messages and the next `conversation`.
    """

    done: bool
    reason: str | None = None
    added: list[ChatMessage] = field(default_factory=list)
    conversation: list[ChatMessage] = field(default_factory=list)


def take_turn(environment: MultiTurnEnvironment, state: RolloutState) -> Generator[Awaitable[Any], Any, Reply]:
    """Lets the environment respond to the last step of the trajectory. Defines the order of its method calls."""
    if environment.checks_done_first:
        done, reason = check_verdict((yield from settled(environment.is_done(state))))
        if done:
            return Reply(True, reason)
    response = environment.env_response([dict(message) for message in conversation(state)], state)
    if not isinstance(response, list):
        response = yield from settled(response)
    added = serialize_messages(response, "env_response")
    done, reason = check_verdict((yield from settled(environment.is_done(state))))
    if done:
        return Reply(True, reason)
    if state.trajectory[-1].is_truncated and not environment.continues_after_truncation:
        return Reply(True, "truncated")
    before = conversation(state)
    following = yield from settled(environment.get_next_prompt_messages(state, added))
    if added[: len(before)] == before and following == [*before, *added]:
        raise MalformedResultError("env_response returned the whole conversation: return only the new messages")
    return Reply(False, added=added, conversation=serialize_messages(following, "get_next_prompt_messages"))


class _Transcript:
    """The messages of a rollout, and the source of its answers."""

    def __init__(self, answer: Answerer, on_message: Callable[[ChatMessage], None]) -> None:
        self._answer, self._on_message = answer, on_message
        self.messages: list[ChatMessage] = []
        self.num_answers = 0

    def add(self, messages: Iterable[ChatMessage]) -> None:
        for message in messages:
            self._on_message(message)
            self.messages.append(message)

    def ask(self, conversation: list[ChatMessage]) -> Answer | None:
        """Returns the next answer, if there is one. Raises `NoAnswerError` if there is not even a first answer."""
        given = self._answer(conversation)
        if given is None and not self.num_answers:
            raise NoAnswerError("There is no answer to the first prompt.")
        self.num_answers += given is not None
        return given


Scored = Generator[Awaitable[Any], Any, tuple[RewardResult, str | None]]
"""A rollout in steps. Returns the reward, and why it ended."""


def _single_turn(environment: Any, sample: Sample, transcript: _Transcript) -> Scored:
    messages = environment.build_messages(sample.prompt)
    transcript.add(messages)
    given = transcript.ask(messages)
    assert given is not None
    completion = answer_text(given.text)
    transcript.add([assistant_message(completion)])
    result = yield from settled(environment.compute_reward(completion, sample, eos_token=environment.eos_token))
    return result, "truncated" if given.is_truncated else None


def _several_turns(environment: Any, sample: Sample, transcript: _Transcript) -> Scored:
    state = yield from settled(environment.create_initial_state(sample))
    prompt = serialize_messages(environment.get_initial_prompt(sample), "get_initial_prompt")
    transcript.add(prompt)
    reason: str | None = NO_MORE_ANSWERS
    try:
        while (given := transcript.ask(prompt)) is not None:
            message = assistant_message(answer_text(given.text))
            state.trajectory.append(TrajectoryStep(prompt, [message], is_truncated=given.is_truncated))
            transcript.add([message])
            reply = yield from take_turn(environment, state)
            if reply.done:
                reason = reply.reason
                break
            transcript.add(reply.added)
            prompt = reply.conversation
        state.is_completed, state.stop_reason = True, reason or state.stop_reason
        result = yield from settled(environment.compute_reward(state, eos_token=environment.eos_token))
        return result, state.stop_reason
    finally:
        yield from settled(environment.end_rollout(state))


def _agent(environment: Any, sample: Sample, transcript: _Transcript) -> Scored:
    services = _TextServices(environment, sample, transcript)
    context = RolloutContext(services, time.monotonic() + environment.rollout_timeout_seconds)
    result = yield from settled(environment.rollout(sample, context))
    if isinstance(result, RewardResult):
        result.sample_metrics = {**context.metrics, **result.sample_metrics}
    return result, None


class _TextServices:
    """The `Services` of an agent that only generates text, without an engine."""

    api_key = ""

    def __init__(self, environment: Any, sample: Sample, transcript: _Transcript) -> None:
        self._environment, self._sample, self._transcript = environment, sample, transcript
        self._last: list[ChatMessage] = []
        """The last conversation. Messages that a call repeats are in the transcript once."""

    async def complete(self, call: Call) -> AgentAnswer:
        if call.token_ids is not None or call.tools:
            self._refuse()
        asked, last = list(call.messages), self._last
        self._transcript.add(asked[len(last) :] if asked[: len(last)] == last else asked)
        given = self._transcript.ask(asked)
        if given is None:
            number = self._transcript.num_answers + 1
            raise NoAnswerError(f"There is no answer to call {number} of the agent: give one `--answer` for each call.")
        text = strip_think_tags(answer_text(given.text)).strip()
        answer = AgentAnswer(text, finish_reason="length" if given.is_truncated else "stop", raw_text=given.text)
        self._transcript.add([answer.message])
        self._last = [*asked, answer.message]
        return answer

    async def take_turns(self) -> RewardResult:
        run = _several_turns if isinstance(self._environment, MultiTurnEnvironment) else _single_turn
        steps, loop = run(self._environment, self._sample, self._transcript), asyncio.get_running_loop()

        def wait(value: Awaitable[Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(maybe_await(value), loop).result()

        result, _ = await asyncio.to_thread(take_steps, steps, wait)
        return result

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            "The agent uses more than text (tools, token ids, a judge, a sandbox or its endpoint). Run `telescope envs "
            f"check {self._environment.name}`, with --model FOLDER and --url of a server of vLLM for a model's answers."
        )

    judge = sandbox = held = base_url = _refuse


API_KEY_VARIABLE = "OPENAI_API_KEY"
ANSWER_SECONDS = 300.0


class ChatServer:
    """A server at `url` (with or without `/v1`). `model` defaults to the first that it serves.

    `key` defaults to the environment variable `OPENAI_API_KEY`. `max_tokens` None leaves the limit to the server.
    `stops` are the request parameters that define what ends an answer.
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
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}; write it with http:// or https://.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._key = key or os.environ.get(API_KEY_VARIABLE)
        self._options = {"temperature": temperature, **(stops or {})}
        self._options |= {} if max_tokens is None else {"max_tokens": max_tokens}
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
        """Returns the completion of token ids by a vLLM server, and whether the model ended it."""
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
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read(300).decode("utf-8", "replace")
            is_refused = error.code in (401, 403)
            fix = f". Set the environment variable {API_KEY_VARIABLE} to a valid key" if is_refused else ""
            raise RunError(f"{self._base}{path} answered {error.code}: {text}{fix}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last of a server without HTTP
            raise RunError(f"{self._base}{path} cannot be reached: {error}") from error
