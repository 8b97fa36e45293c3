"""The process that copies a run's numbers and record to its trackers.

    stdin --main thread--> one queue per tracker --> one thread per tracker --> wandb, tensorboard, trackio
    run directory --RecordFollower (a thread): gauges, histograms, changed files--^

Reads JSON lines from stdin and writes JSON lines to stdout. `sink` starts and ends it; it also ends when stdin closes,
and so when the driver exits.

Invariants: what trackers print goes to stderr, which is a log file. Stdout has only messages for the user. A tracker
that blocks or fails costs its own numbers only. Memory is bounded.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from telescope.record.reader import Run
from telescope.trackers.base import MAX_WAITING, TITLES, Report, TrackedRun, start_tracker
from telescope.trackers.follower import RecordFollower

FINISH_SECONDS = 300.0
"""Longest time for the last uploads after stdin closed."""

Message = dict[str, Any]


def main() -> int:
    """Reads messages until stdin closes. Returns the exit status."""
    messages = (json.loads(line) for line in sys.stdin.buffer)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints, and those of child processes, go to stderr
    lock = threading.Lock()

    def report(level: str, message: str) -> None:
        with lock:
            print(json.dumps({"level": level, "message": message}), file=out, flush=True)

    first = next(messages, None)
    if first is None:
        return 0
    run = TrackedRun(**first["run"])
    threads = [TrackerThread(name, run, report) for name in first["trackers"]]

    def send(message: Message) -> None:
        for thread in threads:
            thread.put(message)

    follower = RecordFollower(run, send) if run.has_record else None
    for message in messages:
        if message["kind"] != "fill in":
            send(message)
            continue
        # Recorded steps before one. Trackers leave out those that they have.
        for row in Run(run.directory).table("steps", columns=["step", "metrics"]).to_pylist():
            if row["step"] < message["before"]:
                send({"kind": "step", "step": row["step"], "metrics": dict(row["metrics"] or ())})
    deadline = threading.Timer(FINISH_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    if follower is not None:
        follower.close()
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join()
    return 0


class TrackerThread(threading.Thread):
    """Starts one tracker and passes messages to it. The first failure is reported, and the run goes on."""

    def __init__(self, name: str, run: TrackedRun, report: Report) -> None:
        super().__init__(name=f"telescope-{name}", daemon=True)
        self._tracker_name = name
        self._run_info = run
        self._report = report
        self._queue: queue.Queue[Message | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._has_failed = False
        self.start()

    def put(self, message: Message) -> None:
        """Adds a message. Returns at once."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Ends the thread after the waiting messages."""
        self._queue.put(None)  # waits for space; `main` has a deadline
        if self._num_dropped:
            self._fail(f"was too slow for {self._num_dropped} messages; the record has all of them")

    def run(self) -> None:
        """Passes messages until `close`."""
        tracker = self._attempt(partial(start_tracker, self._tracker_name, self._run_info, self._report))
        last_step = -1 if tracker is None else tracker.last_step
        while (message := self._queue.get()) is not None:
            if tracker is None:
                continue
            if message["kind"] == "step" and not all(name.startswith("eval/") for name in message["metrics"]):
                if message["step"] <= last_step:
                    continue
                last_step = message["step"]  # the trainer may restart from an earlier step
            if message["kind"] == "histograms" and message["step"] <= tracker.last_step:
                continue
            kind, values = message["kind"], {key: value for key, value in message.items() if key != "kind"}
            if (method := getattr(tracker, "upload" if kind == "files" else f"log_{kind}", None)) is not None:
                self._attempt(partial(method, **values))
        if tracker is not None:
            self._attempt(tracker.finish)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever a tracker's package raises
            traceback.print_exc(file=sys.stderr)
            self._fail(f"failed: {str(error) or repr(error)}")
            return None

    def _fail(self, problem: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(
                "WARNING", f"{TITLES[self._tracker_name]} {problem}. The run continues; see logs/trackers.log."
            )


if __name__ == "__main__":
    sys.exit(main())
