"""Reads the log of a starting vLLM: the current stage, or why it failed.

A failure is shown as what failed, the likely fix, the one or two relevant log lines, and the path of the log. A line of
no known stage is ignored, so another version of vLLM shows fewer stages and no noise. Pure text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from telescope.inference.vllm.launch import hint_for
from telescope.utils.text import plain, single_line

NUM_LINES = 5

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\) )?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_NOT_TELLING = re.compile(
    r"\s|$|Traceback \(most|During handling of the above|The above exception was|\S*:\d+: \w*Warning: |"
    r"telescope: engine process \d+ (?:ended|was killed)"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
    """Returns the message; its first line is complete by itself. `ended`: the process exited, so its last lines explain
    why."""
    first = f"{name} {what}"
    hint = hint_for("\n".join(log))
    if hint is not None:
        first += f". Likely fix: {hint}"
    lines = (error_lines(log) if ended else []) or [line for line in log if line.strip()][-NUM_LINES:]
    parts = [first]
    if lines:
        parts += ["Its log:", *(f"  {single_line(line)}" for line in lines)]
    return "\n".join([*parts, f"Log: {log_path}"])


def error_lines(log: Sequence[str]) -> list[str]:
    """Returns the last error lines of a log, each once, without vLLM's prefixes: no traceback frames, progress or
    banner, nothing from before the first error."""
    found: dict[str, None] = {}
    seen_error = False
    for line in log:
        text = plain(line)
        prefix = _PREFIX.match(text)
        assert prefix is not None  # every part of it is optional
        text = text[prefix.end() :]
        if prefix[1] in ("DEBUG", "INFO", "WARNING") or _NOT_TELLING.match(text):
            continue
        if not seen_error and (prefix[1] is not None or _ERROR.match(text)):
            seen_error = True
            found.clear()
        found.setdefault(text.rstrip())
    return list(found)[-NUM_LINES:]


FIRST_STAGE = "loading libraries"

STAGES = (
    (r"Initializing a V\d LLM engine|vLLM API server version", "starting the engine"),
    (r"Starting to load model|Loading weights|Loading safetensors checkpoint", "loading the weights"),
    (r"Loading weights took|Model loading took", "weights loaded"),
    (r"torch\.compile takes|Dynamo bytecode|Compiling a graph", "compiling"),
    (r"KV cache|cache blocks|Maximum concurrency", "allocating the KV cache"),
    (r"[Cc]apturing (CUDA )?graph|Graph capturing", "capturing CUDA graphs"),
    (r"init engine .*took|Starting vLLM (API )?server|Started server process|Application startup", "opening the API"),
)
"""Patterns of log lines of vLLM 0.26 to 0.32 and their stages; the last match of a line counts."""

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str]) -> str | None:
    """Returns the stage of the newest matching line; None when no line matches."""
    for line in reversed(lines):
        for pattern, stage in reversed(STAGES):
            if re.search(pattern, line):
                share = _SHARE.search(line)
                return f"{stage}, {share[1]} %" if share else stage
    return None
