"""Whether a run still lives can be told from its directory."""

import time
from dataclasses import replace

from telescope.record.files import RunFiles, replace_json
from telescope.record.run_info import STALE_SECONDS, RunInfo, next_attempt, read_run_json, status_now, write_run_json
from telescope.record.writer_lock import ProcessIdentity

ELSEWHERE = ProcessIdentity("other", 12, "34", "another boot", "another namespace")


def info(process: ProcessIdentity, status: str = "running") -> RunInfo:
    return RunInfo("id", "name", status, started_at=1.0, attempt=3, process=process.to_json())


def test_this_process_is_alive_and_one_with_its_id_but_another_start_is_not():
    current = ProcessIdentity.current()
    assert current.is_alive() is True
    assert replace(current, started="1").is_alive() is False
    assert replace(current, pid=2**22 + 1).is_alive() is False


def test_a_process_of_another_machine_cannot_be_judged():
    assert ELSEWHERE.is_alive() is None


def test_a_started_run_is_live_while_its_process_is(tmp_path):
    current = ProcessIdentity.current()
    assert status_now(tmp_path, info(current)) == "live"
    assert status_now(tmp_path, info(replace(current, started="1"))) == "dead"


def test_a_run_elsewhere_is_live_while_it_gives_signs_of_life(tmp_path):
    assert status_now(tmp_path, info(ELSEWHERE)) == "dead"
    replace_json(RunFiles(tmp_path).heartbeat, {"time": time.time()})
    assert status_now(tmp_path, info(ELSEWHERE)) == "live"
    replace_json(RunFiles(tmp_path).heartbeat, {"time": time.time() - 2 * STALE_SECONDS})
    assert status_now(tmp_path, info(ELSEWHERE)) == "dead"


def test_an_end_that_was_written_stands_whatever_became_of_the_process(tmp_path):
    assert status_now(tmp_path, info(ProcessIdentity.current(), "failed")) == "failed"


def test_run_json_comes_back_as_written_and_counts_attempts(tmp_path):
    assert next_attempt(tmp_path) == 1
    assert read_run_json(tmp_path) is None
    written = info(ELSEWHERE)
    write_run_json(tmp_path, written)
    assert read_run_json(tmp_path) == written
    assert next_attempt(tmp_path) == 4


def test_a_damaged_run_json_is_no_error(tmp_path):
    RunFiles(tmp_path).run_json.write_text("{")
    assert read_run_json(tmp_path) is None
    assert status_now(tmp_path, None) == "unknown"
