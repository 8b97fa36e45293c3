"""The process behind `telescope ui --demo`: writes the runs of the demo, then one step every few seconds.

`demo_runs` starts and ends it. It runs as `python -m telescope.testing.demo_run.live FOLDER STEPS`, prints a line when
the run can be looked at, and ends, and removes the folder, when its standard input is closed.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telescope.errors import RunError
from telescope.testing.demo_run.curves import Curves, Story
from telescope.testing.demo_run.telemetry import gauges_at
from telescope.testing.demo_run.writer import RunWriter

NUM_STEPS = 240
STEPS_TO_COME = 200
STORY = Story(loops=(120, 155), spike=188, server_down=(80, 83), slow_from=225, skipped_eval=90, learning=4.0)

OTHERS = {
    "demo-lr-3e-6": (Story(learning=4.5, learning_rate=3e-6, spike=91), 160, None),
    "demo-lr-1e-5": (
        Story(learning=6.0, learning_rate=1e-5, not_finite=78), 79,
        "ArithmeticError: the loss of step 78 is not a number. Lower learning_rate",
    ),
}  # fmt: skip
"""Runs to compare with, which have ended: name to story, steps, and the error that ended it."""

START_SECONDS = 180.0
"""Time for the first run; it takes some seconds on an idle machine."""
END_SECONDS = 5.0
GAUGE_SECONDS = 2.0
OLD_GAUGE_SECONDS = 15.0
"""Time between two readings: live, and before."""


@contextmanager
def demo_runs(num_steps: int = NUM_STEPS) -> Iterator[Path]:
    """Generates runs in a temporary folder, which is removed at the end. One run goes on after `num_steps`.

    Raises `RunError` if they cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="telescope-demo-"))
    command = [sys.executable, "-m", "telescope.testing.demo_run.live", str(folder), str(num_steps)]
    # A session of its own: Ctrl-C in the terminal reaches the server alone, which then ends this process.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        if not ready or not process.stdout.readline():
            raise RunError(f"The generated run was not written to {folder}. The lines above name the cause.")
        yield folder
    finally:
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path, num_steps: int) -> int:
    """Writes the runs until standard input is closed. They have `num_steps` steps at first. Returns the exit code."""
    try:
        origin = time.time() - Curves(STORY).start(num_steps)
        with RunWriter(folder / "demo", STORY, num_steps=num_steps + STEPS_TO_COME, origin=origin) as writer:
            for number in range(num_steps):
                writer.write_step(number)
            writer.write_gauges(num_steps, OLD_GAUGE_SECONDS)
            writer.recorder.flush()
            print("ready", flush=True)
            if not _go_on(writer, num_steps, _write_others(folder, origin)):
                return 0
            writer.end()
        sys.stdin.buffer.read()  # until it is closed
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _go_on(writer: RunWriter, num_steps: int, others: Iterator[bool]) -> bool:
    """Writes the steps that are left, each when its time comes. Returns False when it is no longer wanted."""
    curves, origin = writer.simulation.curves, writer.origin
    for number in range(num_steps, num_steps + STEPS_TO_COME):
        end, gauges_due = origin + curves.start(number + 1), 0.0
        while (now := time.time()) < end:
            if now >= gauges_due:
                gauges_due = now + GAUGE_SECONDS
                for row in gauges_at(curves, origin, now, number):
                    writer.recorder.write("gauges", row)
                writer.write_in_flight(number, now)
            seconds = 0.0 if next(others, False) else max(0.0, min(end, gauges_due) - time.time())
            if select.select([sys.stdin], [], [], seconds)[0] and not sys.stdin.buffer.read(1):
                return False
        writer.write_step(number)
    return True


def _write_others(folder: Path, origin: float) -> Iterator[bool]:
    """Writes the other runs, in the past. Yields True after each step."""
    for place, (name, (story, num_steps, error)) in enumerate(OTHERS.items(), 1):
        begun = origin - 86_400 * place
        with RunWriter(folder / name, story, num_steps=200, seed=place, origin=begun) as writer:
            for number in range(num_steps):
                writer.write_step(number)
                yield True
            writer.end("failed" if error else "stopped", error)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
