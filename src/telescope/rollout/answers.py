"""Reads the answers of a policy to an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from telescope.environments.tool_calls import ToolCall


def parse_answer(
    text: str, *, opened: str, tools: Sequence[Mapping[str, Any]], is_cut: bool
) -> tuple[str, str, list[ToolCall]]:
    """Returns text, reasoning and tool calls of an answer."""
    return text, "", []
