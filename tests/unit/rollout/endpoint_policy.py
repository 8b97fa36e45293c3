"""A scripted policy behind the endpoint of a rollout worker, asked in three dialects."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai

from telescope.environments.context import Answer, Call
from telescope.environments.tool_calls import ToolCall
from telescope.rollout.endpoint import Endpoint

USER = {"role": "user", "content": "How warm is it?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ANSWER = Answer(
    "Let me look.", "Which city?",
    [ToolCall("weather", {"city": "Zürich"}), ToolCall("clock", None, "clock(", "The call has no end.")], "tool_calls",
    [5, 6], [-0.5, -0.25], num_prompt_tokens=7, id="a1",
)  # fmt: skip


class Policy:
    """A scripted `Services.complete` with the endpoint before it."""

    def __init__(self, server: Endpoint) -> None:
        self.server = server
        self.calls: list[Call] = []
        self.cancelled: list[Call] = []
        self.dropped: list[Answer] = []
        self.refused: list[str] = []
        self.answer: Answer | Exception = ANSWER
        self.wait: asyncio.Event | None = None
        self.key = server.open(self.complete, self.count, self.dropped.append, self.refused.append)

    async def complete(self, call: Call) -> Answer:
        self.calls.append(call)
        try:
            if self.wait:
                await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled.append(call)
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def count(self, call: Call) -> int:
        if not call.messages:
            raise IndexError("the template reads the first message")
        return 10 * len(call.messages)

    def openai(self, chat: str = "", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{"api_key": self.key, "base_url": self.server.base_url(chat), **options})

    def anthropic(self, chat: str = "", **options: Any) -> Any:
        import anthropic  # three seconds, which the processes of other tests do not need

        url = self.server.base_url(chat).removesuffix("/v1")
        return anthropic.AsyncAnthropic(**{"api_key": self.key, "base_url": url, **options})

    async def post(self, route: str = "chat/completions", body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else json.dumps({"messages": [USER]} if body is None else body)
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.server.base_url()}/{route}", data=data, headers=headers) as response,
        ):
            text = await response.text()
            return response.status, json.loads(text) if response.content_type.endswith("json") else text, response


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the endpoint has no event for it
        await asyncio.sleep(0.002)


# Each asks in one dialect, whole or as a stream, and returns the SDK's object as a dict.


async def ask_chat(policy: Policy, stream: bool, **options: Any) -> dict[str, Any]:
    options = {"model": "policy", "messages": [USER], **options}
    client = policy.openai().chat.completions
    if not stream:
        return (await client.create(**options)).to_dict()
    async with client.stream(**options) as events:
        return (await events.get_final_completion()).to_dict()


async def ask_responses(policy: Policy, stream: bool, **options: Any) -> dict[str, Any]:
    options = {"model": "policy", "input": USER["content"], **options}
    client = policy.openai().responses
    if not stream:
        return (await client.create(**options)).to_dict()
    async with client.stream(**options) as events:
        return [event async for event in events][-1].response.to_dict()  # of an incomplete one too


async def ask_messages(policy: Policy, stream: bool, **options: Any) -> dict[str, Any]:
    options = {"model": "policy", "max_tokens": 50, "messages": [USER], **options}
    client = policy.anthropic().messages
    if not stream:
        return (await client.create(**options)).to_dict()
    async with client.stream(**options) as events:
        return (await events.get_final_message()).to_dict()
