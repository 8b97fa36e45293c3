"""A judge behind OpenAI's chat API, whose answers a test scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.fakes.http import Handler, serve

Reply = tuple[int, Any, dict[str, str]]
"""Status, the answer (text, or the raw body of an error), and further headers."""


def grades(body: dict[str, Any], grade: int) -> str:
    """Returns an answer that gives every criterion of a request the same grade."""
    properties = body["response_format"]["json_schema"]["schema"]["properties"]
    kinds = {"string": "because", "integer": grade, "boolean": True}
    return json.dumps({name: kinds[schema["type"]] for name, schema in properties.items()})


def make_retries_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the SDK try again without pauses, where the server asks for none."""
    import openai._base_client

    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], str | Reply]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serves `answer(request body)`. Yields the URL and the list of requests, with the key as `key`."""
    requests: list[dict[str, Any]] = []

    class Judge(Handler):
        def do_POST(self) -> None:
            body = self.body
            requests.append(body | {"key": self.headers["Authorization"].removeprefix("Bearer ")})
            replied = answer(body)
            status, text, headers = (200, replied, {}) if isinstance(replied, str) else replied
            message = {"role": "assistant", "content": text}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            made = {"id": "1", "object": "chat.completion", "created": 1, "model": "j", "choices": [choice]}
            self.send_json(made | {"usage": usage} if status == 200 else {"error": {"message": text}}, status, headers)

    with serve(Judge) as url:
        yield f"{url}/v1", requests
