"""The process that copies the record of a run to its trackers.

    run directory --RecordNews--> one thread per tracker --> wandb, tensorboard, trackio

`launch` starts it. It ends when stdin closes, which it does when the record is complete or the driver has exited.

Invariants: what trackers print goes to stderr, which is a log file. Stdout has only messages for the user. A tracker
that blocks or fails costs its own numbers only. Nothing waits in memory: a slow tracker reads the record later.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from telescope.record.reader import Run
from telescope.trackers.base import TITLES, Report, TrackedRun, Tracker
from telescope.trackers.news import RecordNews

FINISH_SECONDS = 300.0
"""Longest time for the last uploads after stdin closed."""


def main() -> int:
    """Copies until stdin closes. Returns the exit status."""
    out = os.dup(1)
    os.dup2(2, 1)  # prints, and those of child processes, go to stderr
    first = sys.stdin.buffer.readline()
    if not first:
        return 0
    run = TrackedRun(**json.loads(first))
    if run.attempt > 1:
        rows = Run(run.directory).rows_since("steps", 0, ["attempt", "step"])[0].to_pylist()
        run = replace(run, last_step=max((row["step"] for row in rows if row["attempt"] < run.attempt), default=-1))

    def report(level: str, message: str) -> None:
        os.write(out, f"{level} {' '.join(message.split())}\n".encode())

    ended = threading.Event()
    threads = [TrackerThread(name, run, report, ended) for name in run.trackers]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    ended.set()
    deadline = threading.Timer(FINISH_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    for thread in threads:
        thread.join()
    return 0


class TrackerThread(threading.Thread):
    """Copies the record to one tracker. The first failure is reported, and the run goes on."""

    def __init__(self, name: str, run: TrackedRun, report: Report, ended: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._tracked = run
        self._report = report
        self._ended = ended
        self._has_failed = False

    def run(self) -> None:
        """Copies what is new, again and again until the end."""
        tracker = self._attempt(self._start)
        if tracker is None:
            return
        news = RecordNews(self._tracked, tracker.last_step)
        ended = False
        while not ended:
            ended = self._ended.wait(self._tracked.interval)
            try:
                for method, *values in news.take(last=ended):
                    self._attempt(partial(getattr(tracker, method), *values))
            except Exception:  # a damaged file, a disk that does not answer: the record is there later
                traceback.print_exc(file=sys.stderr)
        self._attempt(tracker.finish)

    def _start(self) -> Tracker:
        module = importlib.import_module(f"telescope.trackers.{self.name}")
        tracker: Tracker = getattr(module, f"{self.name.title()}Tracker")(self._tracked, self._report)
        return tracker

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever a tracker's package raises
            traceback.print_exc(file=sys.stderr)
            if not self._has_failed:
                self._has_failed = True
                problem = f"{TITLES[self.name]} failed: {str(error) or repr(error)}"
                self._report("WARNING", f"{problem}. The run continues; see logs/trackers.log.")
            return None


if __name__ == "__main__":
    sys.exit(main())
