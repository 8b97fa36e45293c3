"""A run directory shows whether its run is live."""

import os
import time
from dataclasses import asdict, replace

from telescope.record.files import ProcessIdentity, RunFiles, replace_json
from telescope.record.run_info import STALE_SECONDS, RunInfo, next_attempt, read_run_json, status_now, write_run_json

ELSEWHERE = ProcessIdentity("other", 12, "34", "another boot", "another namespace")


def info(process: ProcessIdentity, status: str = "running") -> RunInfo:
    return RunInfo("id", "name", status, started_at=1.0, attempt=3, process=asdict(process))


def test_a_process_with_the_same_id_and_another_start_is_another_process():
    current = ProcessIdentity.current()
    assert current.is_alive() is True
    assert replace(current, started="1").is_alive() is False
    assert replace(current, pid=2**22 + 1).is_alive() is False
    assert ELSEWHERE.is_alive() is None, "that of a process on another machine is unknown"


def test_a_started_run_is_live_while_its_process_runs(tmp_path):
    current = ProcessIdentity.current()
    assert status_now(tmp_path, info(current)) == "live"
    assert status_now(tmp_path, info(replace(current, started="1"))) == "dead"
    assert status_now(tmp_path, info(current, "failed")) == "failed", "a written end is final"


def test_a_run_on_another_machine_is_live_while_it_sends_heartbeats(tmp_path):
    assert status_now(tmp_path, info(ELSEWHERE)) == "dead"
    replace_json(RunFiles(tmp_path).heartbeat, {"time": time.time()})
    assert status_now(tmp_path, info(ELSEWHERE)) == "live"
    old = time.time() - 2 * STALE_SECONDS
    replace_json(RunFiles(tmp_path).heartbeat, {"time": old})
    assert status_now(tmp_path, info(ELSEWHERE)) == "live", "the other machine's clock may be behind"
    os.utime(RunFiles(tmp_path).heartbeat, (old, old))
    assert status_now(tmp_path, info(ELSEWHERE)) == "dead"


def test_run_json_is_read_as_written_and_counts_attempts(tmp_path):
    assert (next_attempt(tmp_path), read_run_json(tmp_path)) == (1, None)
    written = info(ELSEWHERE)
    write_run_json(tmp_path, written)
    assert read_run_json(tmp_path) == written
    assert next_attempt(tmp_path) == 4


def test_a_damaged_run_json_is_no_error(tmp_path):
    RunFiles(tmp_path).run_json.write_text("{")
    assert read_run_json(tmp_path) is None
    assert status_now(tmp_path, None) == "unknown"
