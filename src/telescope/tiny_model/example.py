"""What one step of a warm start is made of: conversations, and what the assistant is taught to say in each turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """What others have said since the assistant spoke last, and what the assistant is taught to say next."""

    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. What was taught in a turn is in the context of the next, right or not."""

    turns: tuple[Turn, ...]


class Examples(Protocol):
    """An endless sequence of examples of one task."""

    def draw(self, wrong_share: float) -> Example:
        """One example; how much of it goes wrong for a `wrong_share` from 0 to 1 is the task's."""
        ...
