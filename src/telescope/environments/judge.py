"""A model that scores answers: any server with OpenAI's chat API, or the policy itself.

    kwargs: {judge: {url: https://api.openai.com/v1, model: gpt-5-mini}}

    score = await self.judge.score(sample.prompt, completion, reference=sample.answer, criteria={"It is polite.": 1})

Invariants: a judge that fails raises `InfrastructureError`, which masks the sample; it never becomes a reward of 0.
Requests with the same model, prompt and schema are sent once; the policy, which changes, is asked every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from telescope.environments.grading import grading_request, object_schema, share_met
from telescope.environments.parsers import answer_text, strip_think_tags
from telescope.errors import InfrastructureError, UserError
from telescope.utils.packages import is_installed

POLICY, KEY_VARIABLE = "policy", "OPENAI_API_KEY"
MAX_ANSWERS, MAX_RETRIES = 3, 4
"""Answers until one fits the schema, and retries of a request by the SDK, with growing pauses."""

USAGE: ContextVar[dict[str, float] | None] = ContextVar("judge usage", default=None)
"""Metrics of the current rollout (`judge/...`). `USAGE.set({})` begins a new rollout."""
COMPLETE: ContextVar[Callable[[str], Awaitable[str]] | None] = ContextVar("policy as judge", default=None)
"""Returns an untrained completion of a prompt by the policy. Set by the code that runs a rollout."""


class Judge(BaseModel):
    """The keyword argument `judge` of an environment. It asks from one event loop at a time."""

    model_config = ConfigDict(extra="forbid")

    url: str
    """Address of the API, usually up to `/v1`, or `policy`."""
    model: str = ""
    api_key_variable: str = KEY_VARIABLE
    max_concurrent: int = Field(32, ge=1)
    """Requests of a worker at a time."""
    timeout_seconds: float = Field(90.0, gt=0)
    """Time for an answer, with its retries."""
    cache_size: int = Field(10_000, ge=0)
    """Answers that a worker keeps."""
    price_in: float = 0.0
    """Price of a million tokens of prompts; `price_out` of answers."""
    price_out: float = 0.0
    sampling: dict[str, Any] = {}
    """Further fields of a request, such as `temperature`."""

    _key: str | None = None
    _client: Any = None
    _loop: Any = None
    _slots: Any = None
    _answers: OrderedDict[bytes, asyncio.Task[str]] = PrivateAttr(default_factory=OrderedDict)

    def model_post_init(self, _: Any) -> None:
        """Raises `UserError` for settings that cannot work, and for a missing key."""
        self._key = os.environ.get(self.api_key_variable)
        if self.is_policy:
            return
        if not (self.url.startswith(("http://", "https://")) and self.model):
            raise UserError(f"judge: url is {self.url!r}, model is {self.model!r}; set http(s)://... and a model.")
        if not is_installed("openai"):
            raise UserError("judge: it needs the package openai. Install it: pip install openai")
        if not self._key and (self.api_key_variable != KEY_VARIABLE or "//api.openai.com" in self.url):
            raise UserError(f"judge: {self.url} needs a key. Set {self.api_key_variable}, or api_key_variable.")

    @classmethod
    def of(cls, value: Any) -> Judge:
        """Returns the judge for a keyword argument, which is a judge or its settings. Raises `UserError`."""
        if not isinstance(value, cls | Mapping):
            raise UserError(f"judge is {value!r}, but it must be a mapping, such as {{url: policy}}.")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            from telescope.config.messages import describe_argument  # takes a second, and only errors need it

            known = ", ".join(cls.model_fields)
            raise UserError(f"{describe_argument(error, 'judge', value)}. A judge takes: {known}.") from None

    @property
    def is_policy(self) -> bool:
        return self.url == POLICY

    async def ask(self, prompt: str, schema: Mapping[str, Any] | None = None, model: str | None = None) -> Any:
        """Returns the judge's answer: text, or an object if there is a JSON `schema`. Raises `InfrastructureError`."""
        started_at, request = time.monotonic(), (prompt, schema, model or self.model)
        if self._loop is not asyncio.get_running_loop():  # requests and connections of another loop cannot be used here
            self._loop, self._client = asyncio.get_running_loop(), None
            self._slots = asyncio.Semaphore(self.max_concurrent)
            self._answers = OrderedDict((key, task) for key, task in self._answers.items() if task.done())
        _count(calls=1)
        try:
            # Shielded: others may wait for the same answer.
            text = await (self._answer(*request) if self.is_policy else asyncio.shield(self._shared(*request)))
        finally:
            _count(seconds=time.monotonic() - started_at)
        return text if schema is None else json.loads(text)

    async def score(
        self,
        question: str | Sequence[Mapping[str, Any]],
        answer: str,
        *,
        reference: str = "",
        criteria: str | Mapping[str, float] = "The answer is correct.",
    ) -> float:
        """Returns how far an answer meets the criteria, from 0 to 1. Their weights may be negative.

        The judge does not see the answer's reasoning. An empty answer gets 0.
        """
        answer = strip_think_tags(answer_text(answer)).strip()
        weights = {criteria: 1.0} if isinstance(criteria, str) else criteria
        prompt, schema = grading_request(question, answer, reference, weights)
        return share_met(await self.ask(prompt, schema), weights) if answer else 0.0

    async def check(self) -> None:
        """Sends a small request. Raises `UserError` with the fix if it fails."""
        try:
            if not self.is_policy:
                await self.ask('Reply with {"ready": true}.', object_schema({"ready": {"type": "boolean"}}))
        except InfrastructureError as error:
            raise UserError(f"{error}. Correct url (it usually ends with /v1), model, or the key.") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancels requests and closes connections."""
        for task in self._answers.values():
            task.cancel()
        client, self._client, self._loop = self._client, None, None
        if client is not None:
            await client.close()

    def _shared(self, *request: Any) -> asyncio.Task[str]:
        """Returns the cached or running task of a request, or starts one."""
        key = hashlib.sha256(json.dumps(request).encode()).digest()
        if key in self._answers:
            _count(cache_hits=1)
        else:
            self._answers[key] = asyncio.ensure_future(self._answer(*request))
            self._answers[key].add_done_callback(lambda task: self._ended(key, task))
        self._answers.move_to_end(key)
        return self._answers[key]

    def _ended(self, key: bytes, task: asyncio.Task[str]) -> None:
        if task.cancelled() or task.exception():
            self._answers.pop(key, None)
        while len(self._answers) > self.cache_size:
            self._answers.popitem(last=False)

    async def _answer(self, prompt: str, schema: Mapping[str, Any] | None, model: str) -> str:
        """Asks until an answer fits the schema. Returns it as text, or as JSON."""
        if schema is not None:
            prompt += f"\n\nAnswer with one JSON object that fits this JSON schema:\n{json.dumps(schema)}"
        asked, problem = prompt, f"no answer within {self.timeout_seconds:g} seconds (timeout_seconds)"
        try:
            async with self._slots, asyncio.timeout(None if self.is_policy else self.timeout_seconds):
                for _ in range(MAX_ANSWERS):
                    text = await self._complete(asked, schema, model)
                    try:
                        return text if schema is None else _fitting(text, schema)
                    except ValueError as error:
                        problem = f"its answers do not fit the schema; the last: {text[:200]!r}: {error}"
                        asked = f"{prompt}\n\nYour last answer did not fit ({error}). Write the JSON object alone."
                        _count(failures=1)
        except TimeoutError:
            pass
        raise self._failure(problem, model)

    async def _complete(self, prompt: str, schema: Mapping[str, Any] | None, model: str) -> str:
        if self.is_policy:
            if (complete := COMPLETE.get()) is None:
                raise UserError("judge: url is policy, which judges only within a rollout. Set url to a server.")
            return await complete(prompt)
        openai = await asyncio.to_thread(importlib.import_module, "openai")  # takes a second

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self.url, api_key=self._key or "none", max_retries=MAX_RETRIES, timeout=self.timeout_seconds
            )
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        if schema is not None:
            form = {"name": "answer", "schema": schema, "strict": schema.get("additionalProperties") is False}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        try:
            response = await self._client.chat.completions.with_raw_response.create(**body, extra_body=self.sampling)
            parsed = response.parse()
            text = parsed.choices[0].message.content or ""
        except (openai.OpenAIError, ValueError, TypeError, AttributeError, IndexError) as error:
            problem = f"{type(error).__name__}: {error}"[:500]
            if getattr(error, "status_code", None) in (401, 403):
                why = "has a key that the server refuses" if self._key else "is not set"
                problem += f". The environment variable {self.api_key_variable} (api_key_variable) {why}"
            raise self._failure(problem, model) from error
        tokens = (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) if parsed.usage else (0, 0)
        _count(failures=response.retries_taken, tokens=sum(tokens))
        if cost := (self.price_in * tokens[0] + self.price_out * tokens[1]) / 1e6:
            _count(cost=cost)
        return text

    def _failure(self, problem: str, model: str) -> InfrastructureError:
        return InfrastructureError(f"the judge {model or 'model'!r} at {self.url} failed: {problem}")


def _fitting(text: str, schema: Mapping[str, Any]) -> str:
    """Returns the JSON object in an answer. Raises `ValueError` if none fits the schema."""
    import jsonschema

    text = strip_think_tags(answer_text(text))
    start = re.search(r'\{\s*["}]', text)  # not a brace of LaTeX
    found = text[start.start() : text.rfind("}") + 1] if start else ""
    value = json.loads(found)
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        raise ValueError(error.message[:200])
    return found


def _count(**numbers: float) -> None:
    if (usage := USAGE.get()) is not None:
        for name, number in numbers.items():
            usage[f"judge/{name}"] = usage.get(f"judge/{name}", 0.0) + number
