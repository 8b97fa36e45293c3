r"""Compares mathematical answers in a child process that can be killed.

Answers go to SymPy, which may never finish with a few characters (`9^{9^{9^9}}`) and cannot be interrupted. So a child
process parses and compares them. It is started at the first comparison; one that takes too long kills it, and the next
one starts another. `main`, at the end of this file, runs in the child, everything above in the caller.

The child reads lines of JSON. For `[expected, answer]` it writes whether they are equal, for `[answer]` what it reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
from typing import IO, Any

from telescope.environments.math_notation import MAX_CHARACTERS, has_paired_braces, normalize_answer
from telescope.errors import InfrastructureError, UserError
from telescope.utils.packages import is_installed

START_SECONDS = 120.0
"""Time for the child to import SymPy, on a busy machine."""
MEMORY_BYTES = 2 * 2**30
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from telescope.environments.math_verifier import main; "
    "main()"
)


def check_equal(answer: str, expected: str, timeout_seconds: float) -> bool:
    """Returns whether math-verify considers the texts equal. False when it takes longer than `timeout_seconds`."""
    answer, expected = normalize_answer(answer), normalize_answer(expected)
    if not _is_one_expression(answer) or not _is_one_expression(expected):
        return False
    bases = [_IN_BASE.fullmatch(text) for text in (answer, expected)]
    if bases[0] and bases[1] and int(bases[0][1]) != int(bases[1][1]):
        return False  # math-verify ignores bases
    return _checker.ask([expected, answer], timeout_seconds) is True


def read_expression(answer: str, timeout_seconds: float) -> str | None:
    """Returns the answer as SymPy writes it. None if math-verify reads no single expression in it."""
    answer = normalize_answer(answer)
    read = _checker.ask([answer], timeout_seconds) if _is_one_expression(answer) else None
    return read if isinstance(read, str) else None


_IN_BASE = re.compile(r"-?[0-9A-Z]+_\{?([0-9]{1,2})\}?")


def _is_one_expression(text: str) -> bool:
    """Returns whether the text can be a single answer. It is short, has paired braces, and has no second formula."""
    has_another = "\\boxed" in text or "$" in text.replace("\\$", "")
    return 0 < len(text) <= MAX_CHARACTERS and not has_another and has_paired_braces(text)


class _Checker:
    """Owner of the child process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        """The process that started the child: after a fork it belongs to the parent."""

    def ask(self, texts: list[str], timeout_seconds: float) -> bool | str | None:
        """Returns what the child answers. None if it takes too long or exits."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(texts).encode() + b"\n")
                process.stdin.flush()
                line = _read_line(process.stdout, timeout_seconds)
            except BaseException as error:  # a deadline of the caller leaves an unread answer in the pipe
                self._end()
                if isinstance(error, OSError):
                    return None
                raise
            if line is None or not line.endswith(b"\n"):
                self._end()  # too slow, or the child exited
                return None
            reply: bool | str | None = json.loads(line)
            return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if not is_installed("math_verify"):
            raise UserError("Comparing math answers needs math-verify. Install it with: pip install math-verify")
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._owner = os.getpid()
        assert process.stdout is not None
        try:
            ready = _read_line(process.stdout, START_SECONDS)
        except BaseException:
            self._end()
            raise
        if ready != b"ready\n":
            self._end()
            raise InfrastructureError("the process that compares math answers did not start; its error is in the log")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


_checker = _Checker()


def _read_line(pipe: IO[Any], seconds: float) -> bytes | None:
    """Reads one line. Returns the rest at the end of the stream, and None after `seconds`."""
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        data = os.read(pipe.fileno(), 4096)
        if not data:
            break
        line += data
    return line


# The child


def main() -> None:
    """Compares answers until the stream ends."""
    from telescope.utils.child_guard import end_with_parent

    end_with_parent(os.getppid())
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    os.dup2(2, 1)  # output of libraries must not reach the pipe
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify warns that its own time limits are off; the caller has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answers.write(b"ready\n")
    answers.flush()
    reading = [LatexExtractionConfig()]

    def parsed(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", extraction_config=reading, parsing_timeout=None, raise_on_error=True)

    for line in sys.stdin.buffer:
        reply: bool | str | None = None
        try:
            first, *others = [parsed(text) for text in json.loads(line)]
            if others:
                reply = bool(verify(first, others[0], timeout_seconds=None, raise_on_error=True))
            elif not isinstance(first[0], str):  # parse adds the text itself, which is alone if it was not read
                reply = str(first[0])
        except Exception:  # SymPy may raise anything on a wrong answer
            reply = None
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
