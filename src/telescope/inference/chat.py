"""A conversation with a served model: history, streamed completions, sampling settings.

Uses the server's OpenAI-compatible route, and so the chat template and parsers that the server was started with. Does
not own the server.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from telescope.errors import InfrastructureError, UserError

CONNECT_SECONDS = 10.0


@dataclass
class ChatSettings:
    """Sampling settings. With `max_tokens` None only the context limits a completion."""

    temperature: float
    top_p: float
    max_tokens: int | None = None
    stops: dict[str, Any] = field(default_factory=dict)
    """Request parameters that define what ends a completion."""


@dataclass
class Conversation:
    """The messages so far. `system`, if any, comes before them."""

    client: openai.OpenAI
    model: str
    settings: ChatSettings
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    """Why the last completion ended: `stop`, or `length` if `max_tokens` or the context ended it."""

    def ask(self, text: str) -> Iterator[str]:
        """Yields the completion piece by piece, thinking included. Then adds question and completion to the history.

        If the caller stops early, the server aborts the request and the history keeps what was received. Raises
        `UserError`, with the history unchanged, for a request that the server refuses (a conversation longer than the
        context), and `InfrastructureError` if the server does not respond.
        """
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages: Any = [*system, *self.messages, question]
        settings, answer, self.finish_reason = self.settings, "", None
        try:
            with self.client.chat.completions.create(
                model=self.model, messages=messages, temperature=settings.temperature, top_p=settings.top_p,
                max_completion_tokens=settings.max_tokens or openai.omit, stream=True, extra_body=settings.stops,
            ) as stream:  # fmt: skip
                try:
                    for chunk in stream:
                        piece = self._piece(chunk)
                        answer += piece
                        if piece:
                            yield piece
                finally:
                    self.messages += [question, {"role": "assistant", "content": answer}]
        except openai.BadRequestError as error:
            fix = "/reset begins a new conversation"
            raise UserError(f"the server refused the request: {error.message}. {fix}") from error
        except openai.APIError as error:
            raise InfrastructureError(f"the server does not answer: {error}") from error

    def reset(self) -> None:
        """Begins a new conversation. Keeps `system`."""
        self.messages.clear()

    def _piece(self, chunk: ChatCompletionChunk) -> str:
        """Returns the text of one event. A reasoning parser puts the thinking into a separate field."""
        if not chunk.choices:
            return ""
        choice = chunk.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        extra: dict[str, Any] = choice.delta.model_extra or {}
        thinking = extra.get("reasoning_content") or extra.get("reasoning") or ""
        return thinking + (choice.delta.content or "")


def connect(url: str, secret: str) -> openai.OpenAI:
    """Returns a client for a server at `url`."""
    # No deadline for generation: a completion may take hours on a CPU.
    timeout = openai.Timeout(None, connect=CONNECT_SECONDS)
    # The server is on this machine, which a proxy of the environment would not reach.
    direct = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=secret, timeout=timeout, max_retries=0, http_client=direct)
