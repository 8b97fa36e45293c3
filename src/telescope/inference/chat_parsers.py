"""Whether the installed vLLM has the parsers that a configuration names, asked before anything is made or started.

Owns the question and the words of a refusal. vLLM itself is asked, in a process of its own, since its names change from
version to version, plugins may add to them, and importing it takes seconds: a run that names no parser asks nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from telescope.config import TelescopeConfig
from telescope.config.suggest import did_you_mean
from telescope.errors import ConfigError

ASK_TIMEOUT_SECONDS = 300.0
"""Importing vLLM and torch from a cold disk, on a machine that is busy with other things."""

_ASK = """
import json
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
load_general_plugins()
names = [sorted(manager.list_registered()) for manager in (ToolParserManager, ReasoningParserManager)]
print(json.dumps(names))
"""


@dataclass(frozen=True)
class ParserNames:
    """Names that vLLM knows, for each of the two fields."""

    vllm_tool_call_parser: list[str]
    vllm_reasoning_parser: list[str]


def check_chat_parsers(config: TelescopeConfig) -> None:
    """Raises `ConfigError` when a parser that is named is none of the installed vLLM's: all of them, with its names."""
    wanted = {
        "vllm_tool_call_parser": config.vllm_tool_call_parser,
        "vllm_reasoning_parser": config.vllm_reasoning_parser,
    }
    chosen = {field: name for field, name in wanted.items() if name is not None}
    if not chosen:
        return
    known = known_parsers(" and ".join(chosen))
    problems = []
    for field, name in chosen.items():
        names: list[str] = getattr(known, field)
        if name not in names:
            problems.append(
                f"{field} is {name!r}, which the installed vLLM does not have.{did_you_mean(name, names)} It has: "
                f"{', '.join(names)}"
            )
    if problems:
        raise ConfigError("\n".join(problems))


def known_parsers(asked_for: str = "the parsers") -> ParserNames:
    """The names that the installed vLLM knows, those of its plugins included.

    Raises `ConfigError`, which begins with `asked_for`, when it cannot say.
    """
    advice = "Leave it null to start without, or mend the installation (`telescope doctor`)"
    # Otherwise its log, which it writes to standard output, would come before the answer.
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{asked_for}: vLLM did not say within {ASK_TIMEOUT_SECONDS:.0f} s which parsers it has. {advice}"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"{asked_for}: vLLM could not be asked which parsers it has. {advice}. It says:\n"
            f"{done.stderr.strip()[-2000:]}"
        )
    tools, reasoning = json.loads(done.stdout.strip().splitlines()[-1])
    return ParserNames(tools, reasoning)
