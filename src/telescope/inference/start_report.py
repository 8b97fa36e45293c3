"""Why a server did not start, in a few lines: what failed, the likely fix, what its log says of it, where the log is.

Pure text. A log that ends in a traceback holds hundreds of lines of which one or two tell something; the others stay in
the file.

What a starting vLLM is doing, in a few words, from the lines of its log.

The log itself belongs in its file: for a live view its lines are too long, too many, and not about the run. A line
that no stage knows says nothing, so that another version of vLLM shows fewer stages and no noise. Pure text.
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
    r"telescope: engine process \d+ ended"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
    """The message; its first line stands alone. `ended`: the process did, so that its last words say why."""
    first = f"{name} {what}"
    hint = hint_for("\n".join(log))
    if hint is not None:
        first += f". Likely fix: {hint}"
    lines = (telling_lines(log) if ended else []) or [line for line in log if line.strip()][-NUM_LINES:]
    parts = [first]
    if lines:
        parts += ["Its log says:", *(f"  {single_line(line)}" for line in lines)]
    return "\n".join([*parts, f"Log: {log_path}"])


def telling_lines(log: Sequence[str]) -> list[str]:
    """The last lines of a log that say what went wrong, each once, without vLLM's prefixes: no frames of tracebacks, no
    progress, no banner, nothing from before the first error."""
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
    (r"KV cache|cache blocks|Maximum concurrency", "making the KV cache"),
    (r"[Cc]apturing (CUDA )?graph|Graph capturing", "capturing CUDA graphs"),
    (r"init engine .*took|Starting vLLM (API )?server|Started server process|Application startup", "opening the API"),
)
"""What a line of vLLM 0.26 to 0.32 holds, and what that means; the last that fits a line counts."""

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str]) -> str | None:
    """The stage that the newest telling line of a log shows; None when no line tells."""
    for line in reversed(lines):
        for pattern, stage in reversed(STAGES):
            if re.search(pattern, line):
                share = _SHARE.search(line)
                return f"{stage}, {share[1]} %" if share else stage
    return None
