"""What one step of a warm start is made of: a conversation, and what is to be said next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Example:
    """One chat: what was said and what the assistant is taught to say."""

    messages: list[dict[str, Any]]
    answer: str


class Examples(Protocol):
    """An endless sequence of examples of one task."""

    def draw(self, wrong_share: float) -> Example:
        """One example, wrong with probability `wrong_share`."""
        ...
