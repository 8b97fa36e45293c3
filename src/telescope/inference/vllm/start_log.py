"""Reads the log of a starting vLLM: the current stage, or why the start failed.

A failure is shown as what failed, the likely fix, the one or two relevant log lines, and the path of the log. A line of
no known stage is ignored, so another version of vLLM shows fewer stages and no noise.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from telescope.utils.data import table_of
from telescope.utils.text import plain, single_line

KNOWN = table_of(__file__)
"""Patterns of log lines: `hints` with the fix of a failed start, and `stages`."""


def hint_for(log: str) -> str | None:
    """Returns the fix for a failed start, found in its log."""
    return next((hint["fix"] for hint in KNOWN["hints"] if re.search(hint["pattern"], log)), None)


NUM_LINES = 5

_PREFIX = re.compile(r"^(?:\([\w-]+ pid=\d+\) )?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
_NOT_TELLING = re.compile(
    r"\s|$|Traceback \(most|During handling of the above|The above exception was|\S*:\d+: \w*Warning: |"
    r"telescope: process \d+ (?:ended|was killed)"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
    """Returns the message for a failed start. Its first line is complete by itself.

    `ended`: the process exited, so its log has the reason.
    """
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
    """Returns the last distinct error lines of a log.

    Leaves out vLLM's prefixes, traceback frames, progress, the banner, and lines before the first error.
    """
    found: dict[str, None] = {}
    seen_error = False
    for line in log:
        text = plain(line)
        prefix = _PREFIX.match(text)
        assert prefix is not None  # every part of the pattern is optional
        text = text[prefix.end() :]
        if prefix[1] in ("DEBUG", "INFO", "WARNING") or _NOT_TELLING.match(text):
            continue
        if not seen_error and (prefix[1] is not None or _ERROR.match(text)):
            seen_error = True
            found.clear()
        found.setdefault(text.rstrip())
    return list(found)[-NUM_LINES:]


FIRST_STAGE = "loading libraries"

_SHARE = re.compile(r"(\d+)% Completed")


def start_stage(lines: Sequence[str], last: str = FIRST_STAGE) -> str:
    """Returns the stage of the newest line that shows one, or `last` if none does."""
    for line in reversed(lines):
        for known in reversed(KNOWN["stages"]):
            if re.search(known["pattern"], line):
                share = _SHARE.search(line)
                return f"{known['stage']}, {share[1]} %" if share else known["stage"]
    return last
