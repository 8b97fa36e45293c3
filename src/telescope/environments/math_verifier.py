"""Compares mathematical answers in a child process that can be killed.

Answers go to SymPy, which may never finish with a few characters (`9^{9^{9^9}}`) and cannot be interrupted. So a child
process parses and compares them. It starts at the first comparison. A comparison that takes too long kills it, and the
next comparison starts a new one. `main`, at the end of this file, runs in the child; everything above runs in the
caller.

The child reads JSON. For `[expected, answer]` it writes whether they are equal, for `[answer]` how it reads the answer.
"""

from __future__ import annotations

import cmath
import contextlib
import json
import logging
import os
import re
import resource
import subprocess
import sys
import threading
from fractions import Fraction
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from telescope.environments.math_notation import MAX_CHARACTERS, has_paired_braces, normalize_answer
from telescope.errors import InfrastructureError, UserError
from telescope.utils.packages import is_installed

START_SECONDS = 120.0
"""Time for the child to import SymPy, on a busy machine."""
MEMORY_BYTES = 2 * 2**30
TINY, MOST_ROUNDING = 1e-4, 0.01
"""Of numbers up to `TINY`, relative differences up to `MOST_ROUNDING` are rounding."""
ZERO = 1e-60
"""Numbers that differ by less are equal: SymPy computes `\\ln 6-\\ln 2-\\ln 3` to some 100 digits."""
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
    if _checker.ask([expected, answer], timeout_seconds) is True:
        return True
    # math-verify takes 25% for 25, but not 12.5% for 12.5.
    signs = [bool(_PERCENT.search(text)) for text in (expected, answer)]
    numbers = [normalize_answer(_PERCENT.sub("", text)) for text in (expected, answer)]
    if signs[0] == signs[1] or not all(map(_PLAIN_NUMBER.fullmatch, numbers)):
        return False
    if signs[1]:  # 0.25% is no 0.25
        value = _checker.ask(numbers[:1], timeout_seconds)
        with contextlib.suppress(ValueError, ZeroDivisionError):
            signs[1] = abs(Fraction(str(value))) < 1
    return not signs[1] and _checker.ask(numbers, timeout_seconds) is True


def read_expression(answer: str, timeout_seconds: float) -> str | None:
    """Returns the answer as SymPy writes it. None if math-verify reads no single expression in it."""
    answer = normalize_answer(answer)
    read = _checker.ask([answer], timeout_seconds) if _is_one_expression(answer) else None
    return read if isinstance(read, str) else None


_PERCENT = re.compile(r"\s*\\?%$")
_PLAIN_NUMBER = re.compile(r"(?=.*[0-9])[-+]?[0-9]*\.?[0-9]*(?:/[0-9]+|\\frac(?:[0-9]|\{[0-9]+\}){2})?")
_IN_BASE = re.compile(r"-?[0-9A-Z]+_\{?([0-9]{1,2})\}?")


def _is_one_expression(text: str) -> bool:
    """Returns whether the text can be a single answer: short, with paired braces, and without a second formula."""
    has_another = "\\boxed" in text or "$" in text.replace("\\$", "")
    return 0 < len(text) <= MAX_CHARACTERS and not has_another and has_paired_braces(text)


class _Checker:
    """Owns the child process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._owner = 0
        """The process that started the child: after a fork it belongs to the parent."""

    def ask(self, texts: list[str], timeout_seconds: float) -> bool | str | None:
        """Returns the child's result. None if it takes too long or exits."""
        with self._lock:
            connection, is_done = self._running(), False
            reply: bool | str | None = None
            try:
                with contextlib.suppress(EOFError, OSError):  # the child exited
                    connection.send_bytes(json.dumps(texts).encode())
                    if connection.poll(timeout_seconds):
                        reply, is_done = json.loads(connection.recv_bytes()), True
            finally:
                if not is_done:  # after a timeout of the caller too: an unread answer would stay in the pipe
                    self._end()
            return reply

    def _running(self) -> Connection:
        if self._child is not None and self._owner == os.getpid() and self._child[0].poll() is None:
            return self._child[1]
        if not is_installed("math_verify"):
            raise UserError("Comparing math answers needs math-verify. Install it with: pip install math-verify")
        connection, other = Pipe()
        with other:
            command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(other.fileno())]
            # Output of libraries must not reach the standard output of this process, which may be a pipe.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[other.fileno()])
        self._child, self._owner = (process, connection), os.getpid()
        is_ready = False
        try:
            with contextlib.suppress(EOFError):
                is_ready = connection.poll(START_SECONDS) and connection.recv_bytes() == b"ready"
        finally:
            if not is_ready:
                self._end()
        if not is_ready:
            raise InfrastructureError("the process that compares math answers did not start; its error is in the log")
        return connection

    def _end(self) -> None:
        if self._child is not None:
            (process, connection), self._child = self._child, None
            process.kill()
            process.wait()
            connection.close()


_checker = _Checker()


# The child


def main() -> None:
    """Compares answers until the connection ends."""
    from telescope.utils.child_guard import end_with_parent

    end_with_parent(os.getppid())
    from math_verify import LatexExtractionConfig, parse, verify

    # math-verify warns that its own time limits are off; the caller has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    connection = Connection(int(sys.argv[2]))
    connection.send_bytes(b"ready")
    reading = [LatexExtractionConfig()]
    # `1 < x < 2` equals `(1, 2)`; the child has no time limit of its own.
    options: dict[str, Any] = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}

    def parsed(text: str) -> Any:
        return parse(f"\\boxed{{{text}}}", extraction_config=reading, parsing_timeout=None, raise_on_error=True)

    while True:
        try:
            texts = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply: bool | str | None = None
        try:
            first, *others = map(parsed, texts)
            if others:
                reply = bool(verify(first, others[0], **options))
                with contextlib.suppress(Exception):  # then math-verify's result counts
                    reply = reply and not _differ(first[0], others[0][0])
            elif not isinstance(first[0], str):  # parse adds the text itself, which is alone if it was not read
                reply = str(first[0])
        except Exception:  # SymPy may raise anything on a wrong answer
            reply = None
        connection.send_bytes(json.dumps(reply).encode())


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two numbers differ by more than rounding.

    math-verify compares decimals after rounding to six places, and other numbers by their difference, so that all tiny
    numbers would be equal.
    """
    if one == other:
        return False
    # doit reads percent signs. It comes last, since it would compute the digits of 9^{9^9}.
    values = [value.evalf().doit() for value in (one, other) if getattr(value, "is_number", False)]
    if len(values) < 2 or max(map(abs, values)) > TINY:
        return False
    one, other = map(complex, values)
    if abs(one - other) < max(ZERO, MOST_ROUNDING * max(abs(one), abs(other))):
        return False
    # Rounding to two digits is up to 5%.
    rounded = [complex(f"{value:.1e}") for value in (one, other)]
    return not (cmath.isclose(rounded[0], other) or cmath.isclose(rounded[1], one))
