"""Warm-start conversations, with the answers to learn in each turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages since the last answer, and the answer to learn."""

    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation. The context of a turn contains the earlier answers, right or wrong."""

    turns: tuple[Turn, ...]


class Examples(Protocol):
    """An endless sequence of examples of one task."""

    def draw(self, wrong_share: float) -> Example:
        """One example; how much of it goes wrong for a `wrong_share` from 0 to 1 is the task's."""
        ...
