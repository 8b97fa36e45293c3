"""A tracker that has the earlier steps of a run reads only later ones from the record."""

import tracemalloc

from telescope.record.recorder import Recorder
from telescope.trackers.base import TrackedRun
from telescope.trackers.process import RecordFollower


def test_steps_that_a_tracker_has_need_no_memory(tmp_path):
    metrics = {f"metric_{number}": 1.0 for number in range(100)}
    with Recorder(tmp_path) as recorder:
        for step in range(1000):
            recorder.write("steps", {"step": step, "metrics": metrics})
    run = TrackedRun([], str(tmp_path), "project", "run", "allow", "offline", 5.0)
    follower = RecordFollower(run, last_step=997)
    tracemalloc.start()
    calls = list(follower.take(last=False))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert calls == [("log", step, metrics) for step in (998, 999)]
    assert peak < 2**20, "bytes; as Python objects, the steps before take 14 MB"
