"""The process that talks to W&B for a run: JSON lines in on stdin, JSON lines out on stdout.

Owns the W&B run. Started and ended by `wandb_sink`; it ends by itself when stdin closes, so also when the driver dies.

Invariant: whatever W&B prints goes to stderr, which is a log file; stdout holds only what the user should read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO

FINISH_SECONDS = 300.0
"""Longest time for the last upload after stdin closed. Bounds the life of this process when the driver is gone."""

INIT_SECONDS = 90.0
"""Deadline for reaching the server. After it the run is recorded offline."""


def main() -> int:
    """Read messages until stdin closes. Exit status 0 unless W&B failed for good."""
    messages = (json.loads(line) for line in sys.stdin.buffer)
    said = _private_stdout()
    first = next(messages, None)
    if first is None:
        return 0
    run = _start_run(first, said)
    for message in messages:
        if message["kind"] == "step":
            run.log({"step": message["step"], **message["metrics"]})
        elif message["kind"] == "summary":
            run.summary.update(message["values"])
    deadline = threading.Timer(FINISH_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    run.finish()
    return 0


def _private_stdout() -> TextIO:
    """A stream to the real stdout; from here on, print and child processes write to stderr."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return said


def _start_run(first: dict[str, Any], said: TextIO) -> Any:
    """Start the run as asked, or offline if the server cannot be had."""
    import wandb

    try:
        run = _init(first, first["mode"])
    except wandb.errors.Error as error:
        if first["mode"] == "offline":
            raise
        _say(said, "WARNING", f"W&B cannot be reached, so the run is recorded offline: {error}")
        run = _init(first, "offline")
    if run.url:
        _say(said, "INFO", f"W&B: {run.url}")
    return run


def _init(first: dict[str, Any], mode: Any) -> Any:
    import wandb

    run = wandb.init(
        mode=mode,
        dir=first["directory"],
        project=first["project"],
        name=first["name"],
        tags=first["tags"],
        group=first["group"],
        config=first["config"],
        settings=wandb.Settings(console="off", save_code=False, init_timeout=INIT_SECONDS, silent=True),
    )
    # Steps are a column and not W&B's own counter, which refuses to go back after a resume.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _say(said: TextIO, level: str, message: str) -> None:
    print(json.dumps({"level": level, "message": message}), file=said, flush=True)


if __name__ == "__main__":
    sys.exit(main())
