"""The process behind `telescope ui --demo`: replays the recorded runs, one of them live.

`demo_runs` starts and ends it. It runs as `python -m telescope.testing.demo FOLDER STEPS` and prints a line when the
runs are readable. When its standard input is closed, it removes the folder and ends.
"""

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
from telescope.testing.replay import RECORDING, Replay

LIVE = "demo"
NUM_STEPS, NUM_STEPS_IN_ALL = 55, 400
"""Steps of the live run at the start, and in total."""

END_SECONDS, LOOK_SECONDS = 5.0, 1.0
"""Time for the process to end, and between two writes of the live run."""


@contextmanager
def demo_runs(num_steps: int = NUM_STEPS) -> Iterator[Path]:
    """Replays runs in a temporary folder, which is removed at the end. One run continues after `num_steps`.

    Raises `RunError` if they cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="telescope-demo-"))
    command = [sys.executable, "-m", "telescope.testing.demo", str(folder), str(num_steps)]
    # A new session, so that Ctrl-C in the terminal only reaches the server, which then ends this process.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not process.stdout.readline():
            raise RunError(f"The recorded run was not written to {folder}. The lines above name the cause.")
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
    """Writes the runs until standard input is closed. The live run begins with `num_steps`. Returns the exit code."""
    try:
        others = sorted(path.name for path in RECORDING.iterdir() if path.is_dir() and path.name != LIVE)
        for days, name in enumerate(others, 1):
            with Replay(folder / name, name, origin=time.time() - days * 86_400) as ended:
                ended.write_all()
        with Replay(folder / LIVE, LIVE, num_steps=NUM_STEPS_IN_ALL, num_ended=num_steps) as live:
            live.write_step(num_steps - 1)
            live.recorder.flush()
            print("ready", flush=True)
            last = live.step_end(NUM_STEPS_IN_ALL - 1)
            while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
                live.write_until(now := min(time.time(), last))
                if now == last:
                    live.end()
                    sys.stdin.read()
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
