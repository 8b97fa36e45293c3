"""Writes the record of a run in a separate process, for tests that read it meanwhile or kill it.

python record_writer_process.py RUN_DIR write FLUSH_SECONDS    rows numbered from 0 until killed or stdin closes
python record_writer_process.py RUN_DIR small-files            with a limit on file sizes, as on a full disk
"""

import resource
import select
import sys
import time

from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run, next_attempt


def write(run_dir: str, flush_seconds: float) -> None:
    recorder = Recorder(
        run_dir, attempt=next_attempt(run_dir), flush_seconds=flush_seconds, max_pending_rows=10**6,
        tail_seconds=0.05, block_seconds=0.3, block_rollouts=200,
    )  # fmt: skip
    info = begin_run(recorder, name="numbers", config_hash="0", config_json="{}", first_step=0)
    number = 0
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        for _ in range(3):
            recorder.write("samples", {"sample_id": str(number), "step": number, "completion_text": "x" * 200})
            recorder.write("gauges", {"time": time.time(), "name": "number", "value": number})
            recorder.write("steps", {"step": number, "metrics": {"a": 1.0}})
            number += 1
        if number % 90 == 0 and recorder.flush():
            print(number, flush=True)
    end_run(recorder, info, "finished", config_json="{}")
    recorder.close()
    print(number, flush=True)


def small_files(run_dir: str) -> None:
    """Fills the disk, frees it, and checks the rows."""
    import logging

    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    recorder = Recorder(run_dir, flush_seconds=0.05, max_pending_rows=1000)
    recorder.flush()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    for number in range(600):
        recorder.write("samples", {"sample_id": str(number), "step": 1})
        recorder.write("logs", {"message": str(number)})
        recorder.write("steps", {"step": number})
    deadline = time.monotonic() + 60
    while not recorder.error and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder.error, "the disk is full"
    assert recorder._pending.num_rows == 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert recorder.flush()
    assert recorder.error is None
    recorder.close()


if __name__ == "__main__":
    if sys.argv[2] == "write":
        write(sys.argv[1], float(sys.argv[3]))
    else:
        small_files(sys.argv[1])
