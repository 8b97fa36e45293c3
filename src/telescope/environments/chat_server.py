"""Answers from a model server with OpenAI's chat API, for trying an environment by hand.

One blocking request an answer, with the standard library alone: this is for people at a terminal. Training talks to its
engines in token ids (`inference.client`).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from telescope.environments.base import ChatMessage
from telescope.environments.play import Answer
from telescope.errors import RunError, UserError

API_KEY_VARIABLE = "OPENAI_API_KEY"


class ChatServer:
    """A server at `url` (with or without `/v1`). `model` None: the first that it serves."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        max_tokens: int = 1024,
        temperature: float = 1.0,
        timeout_seconds: float = 300.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}; write it with http:// or https://.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._timeout_seconds = timeout_seconds
        self.model = model or self._first_model()

    def __call__(self, messages: list[ChatMessage]) -> Answer:
        """The next message of the conversation. Raises `RunError` when the server does not give one."""
        answer = self._ask("/chat/completions", {"model": self.model, "messages": messages, **self._options})
        try:
            choice = answer["choices"][0]
            return Answer(choice["message"].get("content") or "", choice.get("finish_reason") == "length")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RunError(f"{self._base} answered out of form: {json.dumps(answer)[:300]}") from None

    def _first_model(self) -> str:
        listed = self._ask("/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RunError(f"{self._base} lists no model; name one with --model") from None

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_seconds) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:300]
            raise RunError(f"{self._base}{path} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise RunError(f"{self._base}{path} cannot be asked: {error}") from error
