"""Loads the environments once before a run, as a trial: imports, constructors and datasets.

Runs user code in a process that can be killed, without a tokenizer, so that it takes a second or two. Owns the
deadlines and the error messages. The rollout workers load everything again.

The child receives one JSON message. It sends one before each load, and the outcome at the end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.environments.user_code import error_text
from telescope.errors import UnreachableError, UserError
from telescope.utils.child_guard import die_with, kill_group
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

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from telescope.rollout.trial import main; main(int(sys.argv[2]))"
)


def try_environments(
    specs: Sequence[EnvironmentSpec],
    *,
    environments_path: Sequence[str | Path] = (),
    making_seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[EnvironmentInfo]:
    """Loads every environment and its dataset in a separate process. Returns their descriptions, in order.

    `making_seconds` limits the import and constructor of one environment. Calls `say` with a line when it takes long.
    Raises `UserError` with the environment and the fault: an error with its line, an exit of the process, a hang with
    its stack, an empty dataset, or answers that no completion can equal.
    """
    limits = {"starting": START_SECONDS, "making": making_seconds, "dataset": DATASET_SECONDS}
    paths = [str(Path(place).expanduser().resolve()) for place in environments_path]
    request = json.dumps({"specs": [asdict(spec) for spec in specs], "paths": paths, "parent": os.getpid()})
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="telescope-trial-") as folder, ours:
        log = Path(folder) / "environments.log"
        with log.open("wb") as output, theirs:
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        try:
            with contextlib.suppress(OSError):  # its end is reported below
                ours.send_bytes(request.encode())
            return _outcome(child, ours, limits, log, say)
        finally:
            kill_group(child.pid)
            child.wait()


def notices_of(infos: Sequence[EnvironmentInfo]) -> list[str]:
    """Returns the notices of environments without duplicates."""
    return list(dict.fromkeys(text for info in infos for text in info.notices))


def _outcome(
    child: subprocess.Popen[bytes], news: Connection, limits: dict[str, float], log: Path, say: Callable[[str], None]
) -> list[EnvironmentInfo]:
    stage, doing, began = "starting", "loading the environments", time.monotonic()
    slow_at = began + SLOW_SECONDS
    while True:
        ends_at = began + limits[stage]
        if not news.poll(max(0.0, min(ends_at, slow_at) - time.monotonic())):
            if slow_at < ends_at:
                slow_at = math.inf
                say(f"{doing} ...")
                continue
            child.send_signal(signal.SIGUSR1)
            time.sleep(STACK_SECONDS)
            fixes = {"making": " (environment_timeout_seconds)", "dataset": ". Download or prepare it before the run"}
            _fail(f"{doing} did not end within {limits[stage]:g} seconds{fixes.get(stage, '')}", log)
        try:
            message: dict[str, Any] = json.loads(news.recv_bytes())
        except (EOFError, OSError):
            _fail(f"{doing} ended the process, which {describe_exit(child.wait())}", log)
        if "ready" in message:
            return [EnvironmentInfo(**fields) for fields in message["ready"]]
        if "failed" in message:
            raise (UserError if message["reachable"] else UnreachableError)(message["failed"])
        stage, doing, began = message["stage"], message["doing"], time.monotonic()
        slow_at = min(slow_at, began + SLOW_SECONDS)


def _fail(text: str, log: Path) -> NoReturn:
    tail = log_tail(log, LOG_TAIL_BYTES)
    raise UserError(text[:1].upper() + text[1:] + (f". Its last output:\n{tail}" if tail else ""))


# The child


def main(descriptor: int) -> None:
    from telescope.rollout.loaded_environment import LoadedEnvironment

    faulthandler.register(signal.SIGUSR1)
    os.set_inheritable(descriptor, False)
    driver = Connection(descriptor)
    request = json.loads(driver.recv_bytes())
    die_with(request["parent"])

    def report(**message: Any) -> None:
        driver.send_bytes(json.dumps(message).encode())

    try:
        specs = [EnvironmentSpec(**fields) for fields in request["specs"]]
        loaded = [
            LoadedEnvironment(
                spec, None, request["paths"], on_stage=lambda stage, doing: report(stage=stage, doing=doing)
            )
            for spec in specs
        ]
        infos = [each.describe(checks_golds=True, checks_template=False) for each in loaded]
    except UserError as error:
        report(failed=str(error), reachable=not isinstance(error, UnreachableError))
    except BaseException as error:
        traceback.print_exc()
        report(failed=error_text(error), reachable=True)
    else:
        report(ready=[asdict(info) for info in infos])
