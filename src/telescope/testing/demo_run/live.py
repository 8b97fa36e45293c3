"""The process behind `telescope ui --demo`: writes the runs of the demo, then one step every few seconds.

Runs as `python -m telescope.testing.demo_run.live FOLDER STEPS`. Prints a line when the run can be looked at: its steps
are written then, and its samples follow, the newest first. Ends, and removes the folder, when its standard input is
closed.
"""

from __future__ import annotations

import math
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from telescope.testing.demo_run.curves import Curves, Story
from telescope.testing.demo_run.telemetry import Gauges
from telescope.testing.demo_run.writer import RunWriter

READY = "ready"
STEPS_TO_COME = 200
READY_STEPS = 8
"""Newest steps that have their samples at first."""
STORY = Story(loops=(520, 650), spike=788, server_down=(340, 343), slow_from=930, skipped_eval=250)

OTHERS = {
    "demo-lr-3e-6": (Story(learning=1.9, learning_rate=3e-6, spike=131), 260, None),
    "demo-lr-1e-5": (
        Story(learning=2.6, learning_rate=1e-5, not_finite=118), 119,
        "ArithmeticError: the loss of step 118 is not a number. Lower learning_rate",
    ),
}  # fmt: skip
"""Runs to compare with, which have ended: name to story, steps, and the error that ended it."""

GAUGE_SECONDS = 2.0
OLD_GAUGE_SECONDS = 15.0
"""Time between two readings: live, and before."""
WORK_SECONDS = 0.3
"""Time for older samples between two looks at the clock."""


def main(folder: Path, num_steps: int) -> int:
    """Writes the runs until standard input is closed. They have `num_steps` steps at first. Returns the exit code."""
    try:
        origin = time.time() - Curves(STORY).start(num_steps)
        with RunWriter(folder / "demo", STORY, num_steps=num_steps + STEPS_TO_COME, origin=origin) as writer:
            for number in range(num_steps):
                writer.write_step(number)
            newest = range(max(0, num_steps - READY_STEPS), num_steps)
            for number in newest:
                writer.write_samples(number)
            writer.recorder.flush()
            print(READY, flush=True)
            if not _go_on(writer, num_steps, _older(writer, folder, newest.start)):
                return 0
            writer.end()
        while not _is_closed(math.inf):
            pass
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _go_on(writer: RunWriter, num_steps: int, older: Iterator[None]) -> bool:
    """Writes the steps that are left, each when its time comes. Returns False when it is no longer wanted."""
    gauges = Gauges(writer.simulation.curves, writer.origin)
    for number in range(num_steps, num_steps + STEPS_TO_COME):
        end = writer.origin + writer.simulation.curves.start(number + 1)
        gauges_due = 0.0
        while (now := time.time()) < end:
            if now >= gauges_due:
                gauges_due = now + GAUGE_SECONDS
                for row in gauges.at(now, number):
                    writer.recorder.write("gauges", row)
                writer.write_in_flight(number, now)
            busy = _work(older)
            if _is_closed(0.0 if busy else max(0.0, min(end, gauges_due) - time.time())):
                return False
        writer.write_samples(number)
        writer.write_step(number)
    return True


def _work(older: Iterator[None]) -> bool:
    """Writes older samples for a moment. Returns whether some are left."""
    until = time.monotonic() + WORK_SECONDS
    while time.monotonic() < until:
        try:
            next(older)
        except StopIteration:
            return False
    return True


def _older(writer: RunWriter, folder: Path, num_steps: int) -> Iterator[None]:
    """Writes what the first steps lack, then the other runs. The newest steps come first. Yields between two steps."""
    yield from writer.write_gauges(num_steps, OLD_GAUGE_SECONDS)
    for number in reversed(range(num_steps)):
        writer.write_samples(number)
        yield
    for place, (name, (story, num_steps, error)) in enumerate(OTHERS.items()):
        begun = writer.origin - 86_400 * (place + 1)
        with RunWriter(folder / name, story, num_steps=300, seed=place + 1, origin=begun) as other:
            for number in range(num_steps):
                other.write_samples(number)
                other.write_step(number)
                yield
            other.end("failed" if error else "stopped", error)


def _is_closed(seconds: float) -> bool:
    """Waits for at most `seconds`. Returns whether standard input is closed."""
    ready, _, _ = select.select([sys.stdin], [], [], None if math.isinf(seconds) else seconds)
    return bool(ready) and not sys.stdin.buffer.read(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
