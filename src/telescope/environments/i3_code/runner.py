"""Runs an answer's program on inputs, inside a sandbox. Uploaded unchanged: standard library only, Python 3.8+.

Reads a job from the file named by its argument, and deletes the file. Every test runs in its own process. Prints one
line: the job's nonce, then JSON. It knows no expected output: it reports a digest of each output, which the environment
compares, so nothing that an answer reads or prints in the sandbox decides whether it is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

MAX_OUTPUT_BYTES = 16 * 2**20
"""Size of a file that a test may write; longer output is an error of the test."""
SHOWN_CHARACTERS = 300
MAX_TIMEOUTS = 3
"""Timeouts after which the remaining tests count as timed out, so that a hanging answer is scored in time."""
NOT_RUN = {"status": "timeout", "digest": "", "seconds": 0.0, "output": "", "stderr": "not run"}

CALL = """
import json, os, sys, types
sys.setrecursionlimit(20_000)
job, out = json.load(sys.stdin), os.fdopen(int(sys.argv[1]), "w")
sys.modules["solution"] = types.ModuleType("solution")  # dataclasses look up their module
scope = vars(sys.modules["solution"])
exec("from typing import *; from collections import Counter, OrderedDict, defaultdict, deque", scope)
exec("import bisect, collections, functools, heapq, itertools, math, random, re, string", scope)  # as LeetCode does
exec(compile(open("program.py").read(), "program.py", "exec"), scope)
function = scope.get(job["name"]) or getattr(scope["Solution"](), job["name"])
value = function(*job["arguments"])
json.dump(value, out, default=lambda value: sorted(value) if isinstance(value, set) else list(value))
out.close()
"""
"""Calls a function of the answer, or a method of its class `Solution`. Tuples and sets become lists."""


def canonical_text(text: str) -> str:
    """Returns the text with normalized whitespace and blank lines, and decimals rounded as in `canonical_value`."""

    def word(token: str) -> str:
        is_decimal = re.fullmatch(r"-?[0-9]+(?:\.[0-9]+(?:e[-+]?[0-9]+)?|e-[0-9]+)", token)
        return json.dumps(_rounded(float(token))) if is_decimal else token

    return "\n".join(" ".join(map(word, line.split())) for line in text.splitlines() if line.strip())


def canonical_value(value: Any) -> str:
    """Returns the same JSON text for values that Python calls equal, except true and 1. Decimals are rounded."""

    def plain(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [plain(each) for each in item]
        if isinstance(item, dict):
            return {str(key): plain(each) for key, each in item.items()}
        return _rounded(item) if isinstance(item, float) else item

    return json.dumps(plain(value), sort_keys=True)


def _rounded(number: float) -> Any:
    """Returns the number with twelve digits: 0.1 + 0.2 is 0.3. Digests of outputs allow no tolerance."""
    rounded = number if number.is_integer() or not math.isfinite(number) else float(f"{number:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def digest(text: str) -> str:
    """Returns the digest with which outputs are compared."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def run_test(program: str, test: Any, function: str | None, seconds: float, memory_bytes: int) -> dict[str, Any]:
    """Runs one test in its own folder. Returns its status, digest, seconds and the start and end of its output."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    folder, started_at, status = tempfile.mkdtemp(), time.monotonic(), "ok"
    with open(os.path.join(folder, "program.py"), "w", encoding="utf-8", errors="replace") as file:
        file.write(program)
    with contextlib.ExitStack() as stack:
        stdin, *outputs = [
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in range(4)
        ]
        stdin.write(json.dumps({"name": function, "arguments": test}) if function else test)
        stdin.seek(0)
        stdout, stderr, value = outputs
        command = ["-c", CALL, str(value.fileno())] if function else ["program.py"]
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[value.fileno()],
            start_new_session=True, preexec_fn=limit,
        )  # fmt: skip
        try:
            status = "error" if child.wait(seconds) else "ok"
        except subprocess.TimeoutExpired:
            status = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for file in outputs:
            file.seek(0)
        printed, errors, returned = [file.read() for file in outputs]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        output = canonical_value(json.loads(returned)) if function else canonical_text(printed)
    except ValueError:
        output, status = "", "error" if status == "ok" else status
    result = {"status": status, "digest": digest(output), "seconds": round(time.monotonic() - started_at, 3)}
    result["output"], result["stderr"] = output[:SHOWN_CHARACTERS], errors[-SHOWN_CHARACTERS:]
    return result


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the answer cannot read this process or its files in /proc
    with open(sys.argv[1]) as file:
        job = json.load(file)
    os.unlink(sys.argv[1])
    os.environ.update(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    rest = job["function"], job["seconds"], job["memory_bytes"]
    results: list[dict[str, Any]] = []
    for test in job["tests"]:
        is_slow = sum(result["status"] == "timeout" for result in results) >= MAX_TIMEOUTS
        results.append(dict(NOT_RUN) if is_slow else run_test(job["program"], test, *rest))
    print("\n" + job["nonce"] + json.dumps(results))
