"""Starts and ends the process that writes the runs of `telescope ui --demo`."""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telescope.errors import RunError

START_SECONDS = 180.0
"""Time for the first steps; it takes three seconds on an idle machine."""

END_SECONDS = 5.0


NUM_STEPS = 1000


@contextmanager
def demo_runs(num_steps: int = NUM_STEPS) -> Iterator[Path]:
    """Generates runs in a temporary folder.

    One of them goes on after `num_steps`. Removes it at the end.

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
