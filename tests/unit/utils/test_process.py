"""Exit codes in words, guarded commands, threads that nothing waits for, log files, and the cycle collector."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest

from telescope.utils.process import (
    THRESHOLDS,
    describe_exit,
    freeze_heap,
    log_size,
    log_tail,
    open_log,
    rare_full_collections,
    rotate_log,
    start_daemon_thread,
    unfreeze_heap,
    without_proxy,
)


@pytest.mark.parametrize(("code", "words"), [
    (0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL"),
    (-11, "was killed by SIGSEGV"), (-40, "was killed by signal 40"),
])  # fmt: skip
def test_an_exit_code_names_the_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_host_without_proxy_is_added_unless_all_are(monkeypatch) -> None:
    for known, hosts in (("", "h"), ("a,h", "a,h"), ("*", "*")):
        monkeypatch.setenv("NO_PROXY", known)
        monkeypatch.delenv("no_proxy", raising=False)
        assert without_proxy("h") == {"no_proxy": hosts, "NO_PROXY": hosts}


async def test_a_daemon_thread_returns_values_and_errors_and_outlives_its_call() -> None:
    """The kernel ends child processes with the thread that started them."""

    code = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); print(flush=True); time.sleep(600)"

    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        return child

    child = start_daemon_thread(start, "starts a child", stays=True).result()
    await asyncio.sleep(0.2)
    assert child.poll() is None
    child.kill()
    child.communicate()
    with pytest.raises(ZeroDivisionError):
        start_daemon_thread(lambda: 1 // 0, "fails").result()


def test_nothing_waits_for_a_daemon_thread_that_was_cancelled() -> None:
    code = """
import asyncio, time
from telescope.utils.process import start_daemon_thread

async def main():
    task = asyncio.wrap_future(start_daemon_thread(lambda: time.sleep(600), "sleeps"))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


IGNORES = """
import os, signal, subprocess, sys
from telescope.utils.process import ignore_sigterm, sigterm_blocked

WITH_HANDLER = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)"
with sigterm_blocked():
    assert subprocess.run([sys.executable, "-c", WITH_HANDLER]).returncode == 0
    ignore_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
assert subprocess.run([sys.executable, "-c", WITH_HANDLER]).returncode == -signal.SIGTERM
print("goes on")
"""


def test_processes_that_ignore_sigterm_start_others_that_do_not() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORES], capture_output=True, text=True, timeout=60)
    assert done.stdout == "goes on\n", done.stderr


@pytest.mark.parametrize(
    ("command", "sent", "said"), [("exit 0", None, ""), ("exit 3", None, "ended with exit code 3"),
                                  ("echo; exec sleep 60", signal.SIGTERM, "")]
)  # fmt: skip
def test_the_end_of_a_guarded_command_is_printed_unless_it_was_asked_to_end(command, sent, said):
    guard = [sys.executable, "-m", "telescope.utils.child_guard", str(os.getpid()), "sh", "-c", command]
    process = subprocess.Popen(guard, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if sent is not None:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert said in errors and bool(said) == bool(errors)
    assert sent is None or process.returncode == 128 + sent, "the guard ended before it could pass the signal on"


def test_lines_are_appended_and_the_tail_is_of_what_came_after_the_start(tmp_path):
    path = tmp_path / "logs" / "x.log"
    with open_log(path) as log:
        log.write(b"before\n")
    start = log_size(path)
    with open_log(path) as log:
        log.write(b"one\ntwo\xff\n")
    assert log_tail(path, 1000, start=start) == "one\ntwo\ufffd"
    assert log_tail(path, 5, start=start) == "two\ufffd"


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_end(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("new")
    assert log_tail(path, 1000, start=500) == "new"


def test_a_folder_that_cannot_be_made_only_loses_the_log(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    path = tmp_path / "logs" / "x.log"
    with open_log(path) as log:
        log.write(b"lost\n")
    assert "its output is lost" in caplog.text
    assert (log_size(path), log_tail(path, 1000)) == (0, "")


def test_a_long_log_is_rotated_while_a_process_appends_to_it(tmp_path):
    path = tmp_path / "x.log"
    with open_log(path) as log:
        for number in range(3):
            log.write(bytes([ord("a") + number]) * 1000)
            log.flush()
            rotate_log(path, 1500)
        log.write(b"next")
    assert path.read_bytes() == b"c" * 1000 + b"next"
    assert path.with_name("x.log.1").read_bytes() == b"a" * 500 + b"b" * 1000


LONGEST_PAUSE_CONTAINERS = 6_000
"""What a collection may visit when all that is young is alive, at about 1 us each: 6 ms."""


def test_young_collections_visit_few_containers() -> None:
    visited: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:
            visited.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    alive: list[list[int]] = []
    with rare_full_collections():
        gc.callbacks.append(count)
        try:
            alive.extend([] for _ in range(10 * THRESHOLDS[0]))
        finally:
            gc.callbacks.remove(count)
    assert len(visited) >= 9
    assert max(visited) <= LONGEST_PAUSE_CONTAINERS


def test_what_exists_at_the_start_is_left_out_and_everything_is_undone_also_after_a_failure() -> None:
    def fail() -> None:
        with rare_full_collections():
            assert gc.get_freeze_count() > 0
            assert gc.get_threshold()[2] > before[2]
            raise KeyError("a loop failed")

    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


class InACycle:
    def __init__(self) -> None:
        self.itself = self


def test_excluded_garbage_is_freed_by_the_next_call() -> None:
    alive = InACycle()
    seen = weakref.ref(alive)
    try:
        freeze_heap()
        del alive
        gc.collect()
        assert seen() is not None
        freeze_heap()
        assert seen() is None
    finally:
        unfreeze_heap()
        assert gc.get_freeze_count() == 0
