"""Trial load of the environments before a run: imports, constructors and datasets.

Runs user code in a process that can be killed, without a tokenizer, so that it takes a second or two. Owns the
deadlines and the error messages. The rollout workers load everything again.

The child reads a line of JSON, and writes lines of JSON: what it is about to load, and at the end the outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.environments.user_code import error_text
from telescope.errors import UnreachableError, UserError
from telescope.utils.child_guard import die_with
from telescope.utils.process import describe_exit, log_tail

START_SECONDS = 120.0
"""Time for a bare interpreter to start on a busy machine."""
DATASET_SECONDS = 600.0
"""Time for one environment to load its dataset, downloads included."""
SLOW_SECONDS = 3.0
"""Time after which a progress line is shown."""
STACK_SECONDS = 1.0
"""Time for a hanging process to write its stack."""
LOG_TAIL_BYTES = 4000

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from telescope.rollout.trial import main; main()"


def try_environments(
    specs: Sequence[EnvironmentSpec],
    *,
    environments_path: Sequence[str | Path] = (),
    making_seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[EnvironmentInfo]:
    """Loads every environment and its dataset in a separate process. Returns their descriptions, in order.

    `making_seconds` bounds the import and the constructor of one environment. Calls `say` with a line when it takes
    long. Raises `UserError` with the environment and the fault: an error with its line, an exit of the process, a hang
    with its stack, an empty dataset, answers that no completion can equal.
    """
    limits = {"starting": START_SECONDS, "making": making_seconds, "dataset": DATASET_SECONDS}
    paths = [str(Path(place).expanduser().resolve()) for place in environments_path]
    request = json.dumps({"specs": [asdict(spec) for spec in specs], "paths": paths, "parent": os.getpid()})
    with tempfile.TemporaryDirectory(prefix="telescope-trial-") as folder:
        log = Path(folder) / "environments.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is reported below
                child.stdin.write(request.encode() + b"\n")
                child.stdin.flush()
            return _outcome(child, limits, log, say)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def notices_of(infos: Sequence[EnvironmentInfo]) -> list[str]:
    """Returns the notices of environments, each once."""
    return list(dict.fromkeys(text for info in infos for text in info.notices))


def _outcome(
    child: subprocess.Popen[bytes], limits: dict[str, float], log: Path, say: Callable[[str], None]
) -> list[EnvironmentInfo]:
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_lines, args=(child, lines), daemon=True).start()
    stage, doing, began, is_slow = "starting", "loading the environments", time.monotonic(), False
    started = began
    while True:
        left = began + limits[stage] - time.monotonic()
        until_slow = SLOW_SECONDS - (time.monotonic() - started)
        try:
            line = lines.get(timeout=max(0.0, left if is_slow else min(left, until_slow)))
        except queue.Empty:
            if not is_slow:
                is_slow = True
                say(f"{doing} ...")
                continue
            child.send_signal(signal.SIGUSR1)
            time.sleep(STACK_SECONDS)
            field = " (environment_timeout_seconds)" if stage == "making" else ""
            _fail(f"{doing} did not end within {limits[stage]:g} seconds{field}{_last_output(log)}")
        if not line:
            ended = describe_exit(child.wait())
            _fail(f"{doing} ended the process, which {ended}{_last_output(log)}")
        message: dict[str, Any] = json.loads(line)
        if "ready" in message:
            return [EnvironmentInfo(**fields) for fields in message["ready"]]
        if "failed" in message:
            _fail(message["failed"], UserError if message["reachable"] else UnreachableError)
        stage, doing, began = message["stage"], message["doing"], time.monotonic()


def _read_lines(child: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(b"")


def _last_output(log: Path) -> str:
    tail = log_tail(log, LOG_TAIL_BYTES)
    return f". Its last output:\n{tail}" if tail else ""


def _fail(text: str, kind: type[UserError] = UserError) -> None:
    raise kind(text[:1].upper() + text[1:])


# The child


def main() -> None:
    """Loads environments, and reports."""
    from telescope.rollout.environment_runner import EnvironmentRunner

    faulthandler.register(signal.SIGUSR1)
    request = json.loads(sys.stdin.readline())
    die_with(request["parent"])
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of user code

    def report(**message: Any) -> None:
        reports.write(json.dumps(message).encode() + b"\n")

    try:
        specs = [EnvironmentSpec(**fields) for fields in request["specs"]]
        runner = EnvironmentRunner(
            specs, None, request["paths"], on_stage=lambda stage, doing: report(stage=stage, doing=doing)
        )
        infos = [runner.describe(position, checks_golds=True, checks_template=False) for position in range(len(specs))]
    except UserError as error:
        report(failed=str(error), reachable=not isinstance(error, UnreachableError))
    except BaseException as error:
        traceback.print_exc()
        report(failed=error_text(error), reachable=True)
    else:
        report(ready=[asdict(info) for info in infos])
