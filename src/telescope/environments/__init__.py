"""Environments: where prompts come from and how answers are scored.

`base` holds the classes to subclass, `registry` finds environments by name, and `rollout` runs their code. The names
below are imported on first use, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telescope.environments.base import (
        BaseEnvironment,
        ChatMessage,
        Environment,
        EvalMetricsResult,
        Messages,
        MultiTurnEnvironment,
        RewardResult,
        RolloutState,
        Sample,
        SingleTurnEnvironment,
        TrajectoryStep,
    )
    from telescope.environments.parsers import (
        extract_answer_tags,
        extract_boxed_answer,
        extract_code_block,
        extract_xml_tag,
        strip_think_tags,
        verify_exact_match,
        verify_math_answer,
    )
    from telescope.environments.registry import check_environments, get_environment, list_environments
    from telescope.environments.rewards import Rubric
    from telescope.environments.tool_env import (
        ToolCall,
        ToolEnvironment,
        ToolResult,
        func_to_tool_schema,
        parse_function_call_syntax,
        parse_xml_tool_calls,
    )

__all__ = [
    "BaseEnvironment", "ChatMessage", "Environment", "EvalMetricsResult", "Messages", "MultiTurnEnvironment",
    "RewardResult", "RolloutState", "Rubric", "Sample", "SingleTurnEnvironment", "ToolCall", "ToolEnvironment",
    "ToolResult", "TrajectoryStep", "check_environments", "extract_answer_tags", "extract_boxed_answer",
    "extract_code_block", "extract_xml_tag", "func_to_tool_schema", "get_environment", "list_environments",
    "parse_function_call_syntax", "parse_xml_tool_calls", "strip_think_tags", "verify_exact_match",
    "verify_math_answer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in ("base", "parsers", "rewards", "registry", "tool_env"):
            owner = importlib.import_module(f"{__name__}.{module}")
            if hasattr(owner, name):
                return getattr(owner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
