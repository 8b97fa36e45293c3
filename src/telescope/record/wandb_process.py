"""The process that sends the metrics of a run to W&B.

Reads JSON lines from stdin and writes JSON lines to stdout. Owns the W&B run. `wandb_sink` starts and ends it; it also
ends when stdin closes, and so when the driver exits.

Invariant: W&B's own output goes to stderr, which is a log file. Stdout has only messages for the user.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO

FINISH_SECONDS = 300.0
"""Longest time for the last upload after stdin closed."""

INIT_SECONDS = 90.0
"""Deadline for reaching the server. Afterwards the run is recorded offline."""

RUN_FIELDS = ("entity", "project", "name", "tags", "id", "resume", "config")
"""Fields of the first message that are arguments of `wandb.init`."""


def main() -> int:
    """Reads messages until stdin closes. Returns the exit status."""
    messages = (json.loads(line) for line in sys.stdin.buffer)
    out = _private_stdout()
    first = next(messages, None)
    if first is None:
        return 0
    run = _start_run(first, out)
    last_step = _last_step(run, first)
    for message in messages:
        if message["kind"] == "step":
            is_eval = all(name.startswith("eval/") for name in message["metrics"])
            if not is_eval:
                if message["step"] <= last_step:
                    continue
                last_step = message["step"]  # the trainer may restart from an earlier step
            run.log({"step": message["step"], **message["metrics"]})
        elif message["kind"] == "summary":
            run.summary.update(message["values"])
    deadline = threading.Timer(FINISH_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    run.finish()
    return 0


def _last_step(run: Any, first: dict[str, Any]) -> float:
    """Returns the last step of earlier attempts in W&B, or -1."""
    if run.resumed:
        last = run.summary.get("step")
        last = last.get("max") if hasattr(last, "get") else last
    else:
        last = first["last_step"] if run.offline else None  # the earlier attempts are in files beside this one's
    return -1 if last is None else last


def _private_stdout() -> TextIO:
    """Returns a stream to the real stdout. Afterwards print and child processes write to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _start_run(first: dict[str, Any], out: TextIO) -> Any:
    """Starts the run as configured, or offline if the server cannot be reached."""
    import wandb

    try:
        run = _init(first, first["mode"])
    except wandb.errors.Error as error:
        if first["mode"] == "offline":
            raise
        _report(out, "WARNING", f"W&B cannot be reached, so the run is recorded offline: {error}")
        run = _init(first, "offline")
    if run.url:
        _report(out, "INFO", f"W&B: {run.url}")
    return run


def _init(first: dict[str, Any], mode: Any) -> Any:
    import wandb

    run = wandb.init(
        mode=mode,
        dir=first["directory"],
        **{name: value for name, value in first.items() if name in RUN_FIELDS},
        allow_val_change=True,  # a resumed run may have another learning rate
        settings=wandb.Settings(console="off", save_code=False, init_timeout=INIT_SECONDS, silent=True),
    )
    # Steps are a column, because W&B's own counter cannot go back after a resume.
    run.define_metric("step", summary="max")  # an eval may end after later steps
    run.define_metric("*", step_metric="step")
    return run


def _report(out: TextIO, level: str, message: str) -> None:
    print(json.dumps({"level": level, "message": message}), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
