"""The interface for user-written rollouts: `RolloutContext`, its conversations, and completions of the policy.

    class Solver(Environment):
        async def rollout(self, sample, context):
            messages = [{"role": "user", "content": sample.prompt}]
            answer = await context.generate(messages)
            return RewardResult(total_reward=float(answer.text == sample.answer))

This is a thin layer over `Services`, which a rollout worker implements (`rollout.context`), so an agent can
be tried without one. Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from telescope.environments.records import ChatMessage, RewardResult
from telescope.environments.tool_calls import ToolCall
from telescope.errors import EnvironmentFailure, UserError
from telescope.sandbox.base import MAX_OUTPUT_BYTES, ExecResult, output_text
from telescope.utils.child_guard import kill_by_variable, kill_group
from telescope.utils.process import describe_exit, start_daemon_thread

MODEL = "policy"
"""Name of the policy at the endpoint."""
PROGRAM_VARIABLE = "TELESCOPE_PROGRAM"
"""Environment variable that marks the processes of a program, also those of its own programs."""
OUTPUT_SECONDS = 5.0
"""Time for the output of a program to arrive after its end."""
COMPACTION = "compaction"
"""Cause of a conversation that begins anew with a shorter history."""
SUMMARY_REQUEST = (
    "Summarize what has happened so far: what you were asked, what you did, what you found, and what is left to do. "
    "The messages above will not be shown again."
)
SUMMARY_HEADING = "Summary of what has happened so far:"


@dataclass(slots=True, frozen=True)
class Call:
    """One request for a completion: `messages` in the form of OpenAI's chat API, or `token_ids`."""

    messages: Sequence[ChatMessage] = ()
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI schemas of the tools that the chat template shows to the model."""
    chat: str = ""
    """Name of the conversation."""
    train: bool = True
    """Whether the sampled tokens are trained."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`max_tokens` and `stop` (list of texts). The run sets the other sampling parameters."""
    cause: str | None = None
    """Why the call does not extend the conversation, if the caller knows (`compaction`)."""


@dataclass(slots=True, frozen=True)
class Answer:
    """A completion of the policy. `raw_text` is the whole sampled text without the end token."""

    text: str
    """Without reasoning, tool calls and the stop text."""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str = "stop"
    """`stop`, `tool_calls`, or `length` if `max_tokens` or the context ended it."""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    num_prompt_tokens: int = 0
    raw_text: str = ""
    id: str = ""
    """Unique in the rollout. Ids of its tool calls contain it."""
    stop_text: str | None = None
    """The text of the call's `stop` that ended it."""

    @property
    def message(self) -> ChatMessage:
        """Returns the completion as a message of OpenAI's chat API, to append to the conversation."""
        message: ChatMessage = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls := self.openai_tool_calls:
            message["tool_calls"] = calls
        return message

    @property
    def openai_tool_calls(self) -> list[dict[str, Any]]:
        """Returns the tool calls in the form of OpenAI's chat API. An unreadable call has its text as arguments."""
        return [
            {
                "id": f"call_{self.id}_{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
                },
            }
            for index, call in enumerate(self.tool_calls)
            for given in [call.raw_text if call.error else call.arguments]
        ]


class RefusedCall(UserError):
    """A call that the policy cannot serve, such as one beyond the context. Endpoints respond with 400 and `code`."""

    code = "context_length_exceeded"


class Services(Protocol):
    """The services of a rollout worker for a rollout."""

    api_key: str
    """Secret of the rollout."""

    async def complete(self, call: Call) -> Answer:
        """Samples a completion. Raises `RefusedCall`, and `InfrastructureError` when no engine responds."""

    async def take_turns(self) -> RewardResult:
        """Runs the turn loop."""

    async def judge(self, prompt: str, schema: Mapping[str, Any] | None, model: str | None) -> Any:
        """Asks the judge. Raises `InfrastructureError`."""

    async def sandbox(self, image: str | None) -> Any:
        """Returns a sandbox that is destroyed with the rollout."""

    def held(self) -> AbstractContextManager[None]:
        """Cancels the task in the block when the rollout ends. Raises `UserError` when it has ended."""

    def base_url(self, chat: str) -> str:
        """Returns the endpoint's URL for one conversation of the rollout."""


class Chat:
    """A conversation with the policy. If it has a `reward`, its tokens get their advantage from that reward."""

    def __init__(self, services: Services, name: str = "", reward: float | None = None) -> None:
        self._services = services
        self.name = name
        self.reward = reward
        self._is_compacted = False
        self._tools: Sequence[Mapping[str, Any]] = ()  # of the last call
        self._clients: list[Any] = []

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    async def generate(
        self,
        prompt: Sequence[ChatMessage] | Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        train: bool = True,
    ) -> Answer:
        """Returns the policy's completion of messages or token ids.

        Messages that extend an earlier call of this rollout reuse its token ids, and only the rest is rendered.
        `sampling` may have `max_tokens` and `stop`.
        """
        is_list = isinstance(prompt, Sequence)
        is_ids = is_list and bool(prompt) and isinstance(prompt[0], int)
        if not is_ids and not (is_list and all(isinstance(message, Mapping) for message in prompt)):
            form = "messages such as {'role': 'user', 'content': 'Hi'}, or of token ids"
            if not is_list or isinstance(prompt, str):
                raise UserError(f"generate got {repr(prompt)[:80]}: give a list of {form}")
            wrong = next(message for message in prompt if not isinstance(message, Mapping))
            fix = "append its `message`" if isinstance(wrong, Answer) else f"give a list of {form}"
            raise UserError(f"generate got a list with {repr(wrong)[:80]}: {fix}")
        for tool in tools or ():
            if not isinstance(tool, Mapping) or "name" not in (tool.get("function") or ()):
                form = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
                raise UserError(f"generate got the tool {repr(tool)[:80]}: write {form}")
        options: dict[str, Any] = {"token_ids": prompt} if is_ids else {"messages": prompt}
        cause, self._is_compacted = COMPACTION if self._is_compacted else None, False
        self._tools = tools or ()
        call = Call(tools=self._tools, chat=self.name, train=train, sampling=sampling or {}, cause=cause, **options)
        return await self._services.complete(call)

    async def compact(
        self, messages: Sequence[ChatMessage], *, keep: int = 2, by: str = "summary"
    ) -> list[ChatMessage]:
        """Returns a shorter conversation: system messages, the first user message, and the last `keep` messages.

        The messages between them are dropped. With `by="summary"`, a summary of them that the policy writes follows the
        first user message, and the summary is trained. It is asked for with the tools of the last call, so that it
        extends the recorded conversation. A tool result whose call is dropped is dropped too. Training continues in a
        new sequence, which begins with the shorter conversation.
        """
        if by not in ("summary", "drop") or keep < 0:
            raise ValueError(f"compact got by={by!r}, keep={keep!r}: use summary or drop, and 0 or more")
        position = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages) - 1)
        head, rest = [dict(message) for message in messages[: position + 1]], list(messages[position + 1 :])
        tail = rest[max(len(rest) - keep, 0) :]
        while tail and tail[0]["role"] != "assistant":
            tail.pop(0)
        if len(tail) == len(rest):
            return [*head, *tail]
        if by == "summary":
            reply = await self.generate([*messages, {"role": "user", "content": SUMMARY_REQUEST}], self._tools)
            summary, before = f"\n\n{SUMMARY_HEADING}\n{reply.text or reply.raw_text}", head[-1]["content"]
            is_text = isinstance(before, str)
            head[-1]["content"] = before + summary if is_text else [*before, {"type": "text", "text": summary}]
        self._is_compacted = True
        return [*head, *tail]

    @property
    def base_url(self) -> str:
        """Returns the URL of an OpenAI-compatible endpoint for this rollout only. Its model is the policy.

        Anthropic's clients take the same URL without `/v1` (`env`).
        """
        return self._services.base_url(self.name)

    @property
    def api_key(self) -> str:
        return self._services.api_key

    def env(self) -> dict[str, str]:
        """Returns the environment variables that point an agent's SDK to the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it sends conversations to OpenAI, with the key of the endpoint
        }

    def openai(self) -> Any:
        """Returns an `openai.AsyncOpenAI` client of the endpoint."""
        import openai

        return self._client(openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient, self.base_url)

    def anthropic(self) -> Any:
        """Returns an `anthropic.AsyncAnthropic` client of the endpoint."""
        import anthropic

        base_url = self.base_url.removesuffix("/v1")
        return self._client(anthropic.AsyncAnthropic, anthropic.DefaultAsyncHttpxClient, base_url)

    def _client(self, client: Any, http_client: Any, base_url: str) -> Any:
        """Returns an SDK's client without retries. Its connections are closed with the rollout."""
        # The endpoint has no TLS, and reading certificates would block the event loop for 60 ms. The rollout's time
        # limit is the only one: the SDKs give a connection 5 seconds, which a busy event loop may need for other work.
        http = http_client(verify=False, timeout=None)
        self._clients.append(http)
        return client(base_url=base_url, api_key=self.api_key, max_retries=0, http_client=http)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


class RolloutContext(Chat):
    """The argument of `Environment.rollout`. It is itself the rollout's main conversation."""

    def __init__(self, services: Services, deadline: float) -> None:
        super().__init__(services)
        self.deadline = deadline
        """Deadline of the rollout, in seconds of `time.monotonic()`."""
        self.cancelled = False
        """Whether the rollout has ended, so that its completions are no longer needed."""
        self.chats: dict[str, Chat] = {}
        self.metrics: dict[str, float] = {}
        self.program_error: str | None = None
        """How the last program of `run` that failed ended."""

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def chat(self, name: str, reward: float | None = None) -> Chat:
        """Opens a named conversation, such as a sub-agent, an opponent or a simulated user.

        With a `reward`, given now or set later, its tokens are compared with the same conversation of the group's other
        samples. Without one they get the rollout's advantage.
        """
        if not isinstance(name, str) or not name or name in self.chats:
            is_known = isinstance(name, str) and name
            raise ValueError(f"the rollout has a chat named {name!r} already" if is_known else "a chat needs a name")
        self.chats[name] = chat = Chat(self._services, name, reward)
        return chat

    async def take_turns(self) -> RewardResult:
        """Runs the environment's turns, the default of `rollout`. Returns the score of `compute_reward`.

        In an evaluation it has the metrics of `compute_eval_metrics`.
        """
        return await self._services.take_turns()

    async def judge(self, prompt: str, schema: Mapping[str, Any] | None = None, model: str | None = None) -> Any:
        """Returns the judge's answer: text, or the parsed object if there is a JSON `schema`. It is never trained.

        A failure raises an error, which masks the sample.
        """
        return await self._services.judge(prompt, schema, model)

    async def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, stdin: str = ""
    ) -> ExecResult:
        """Runs an agent as a local process. Returns its exit code and output.

        Its environment variables include `env()` and `env`. Its processes are killed when it or the rollout ends. The
        middle of an output of more than 1 MiB is left out. Run programs that the model writes in a `sandbox` instead.
        Raises `EnvironmentFailure` if a process that left its group and its environment keeps its output open.
        """
        if isinstance(command, str):
            raise UserError(f"run got the text {command[:80]!r}: give a list of arguments (shlex.split)")
        mark = secrets.token_hex(8)
        marks = f"{os.environ.get(PROGRAM_VARIABLE, '')} {mark}"
        with self._services.held():
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=cwd, start_new_session=True,
                env={**os.environ, **self.env(), **(env or {}), PROGRAM_VARIABLE: marks},
            )  # fmt: skip
            output = asyncio.ensure_future(_communicate(process, stdin.encode()))
            try:
                try:
                    # Polled, because `process.wait` of Python 3.11 also waits until the pipes are closed.
                    while not output.done() and process.returncode is None:
                        await asyncio.wait({output}, timeout=0.1)
                    await asyncio.wait({output}, timeout=1.0)  # children may be writing the rest of it
                finally:
                    await _kill_program(process.pid, mark)  # a daemon of the program would keep its output open
                stdout, errors = await asyncio.wait_for(output, OUTPUT_SECONDS)
            except TimeoutError:
                process._transport.close()  # type: ignore[attr-defined]  # its pipes, which would stay open
                raise EnvironmentFailure(
                    f"{command[0]} ended, but a process that it started in a session and with an environment of its "
                    "own keeps its output open: let that process write to a file"
                ) from None
            finally:
                output.cancel()
        if process.returncode:
            self.program_error = f"{command[0]} {describe_exit(process.returncode)}: {errors.strip()[-200:]}"
        return ExecResult(process.returncode or 0, stdout, errors)

    async def sandbox(self, image: str | None = None) -> Any:
        """Returns a sandbox from the environment's pool. It is destroyed with the rollout."""
        return await self._services.sandbox(image)

    def metric(self, name: str, value: float) -> None:
        """Records a number for this sample, like `sample_metrics` of the reward."""
        self.metrics[name] = float(value)


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes) -> tuple[str, str]:
    """Returns the output of a program like `process.communicate`, but the middle of a long stream is left out."""

    async def write(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # the program does not read it
            stream.write(stdin)
            await stream.drain()
        stream.close()

    async def read(stream: asyncio.StreamReader) -> str:
        total, half, head, tail = 0, MAX_OUTPUT_BYTES // 2, bytearray(), bytearray()
        while piece := await stream.read(half):
            total, room = total + len(piece), half - len(head)
            head += piece[:room]
            tail += piece[room:]
            del tail[:-half]
        return output_text(total, bytes(head + tail))

    assert process.stdin and process.stdout and process.stderr
    _, stdout, errors = await asyncio.gather(write(process.stdin), read(process.stdout), read(process.stderr))
    await process.wait()
    return stdout, errors


async def _kill_program(group: int, mark: str) -> None:
    """Kills a program with its daemons, in a thread, because a machine may have thousands of processes."""
    kill_group(group)
    killed = start_daemon_thread(lambda: kill_by_variable(PROGRAM_VARIABLE, mark), "program end")
    await asyncio.shield(asyncio.wrap_future(killed))
