"""No process or file of a run outlives its driver: with small processes in place of Ray and vLLM."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.processes import has_ended, is_running, wait_for

from telescope.cluster.reaper import LONGEST_SOCKET, MARK_VARIABLE, SOCKET_PATH_BYTES, Reaper, temporary_base

DRIVER = """
import os, subprocess, sys, time
from telescope.cluster.reaper import Reaper

def python(code, **options):
    return subprocess.Popen([sys.executable, "-c", "import ctypes, os, subprocess, sys, time\\n" + code], **options)

SLEEP = "time.sleep(600)"
before = python(SLEEP)
with Reaper():
    child = python(SLEEP)
    # A daemon of its own session whose child has another environment, as user code may start one.
    daemon = python(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})\\n"
        "print(child.pid, flush=True)\\ntime.sleep(600)",
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    grandchild = int(daemon.stdout.readline())
    # As if it had written a title over its environment, and then lost its parent.
    orphan = python(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})\\n"
        "print(child.pid, flush=True)\\ntime.sleep(5)", stdout=subprocess.PIPE, text=True)
    orphaned = int(orphan.stdout.readline())
    orphan.wait()
    print(before.pid, child.pid, daemon.pid, grandchild, orphaned, flush=True)
    {end}
print("left", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start_driver() -> Iterator:
    """A driver with a child that it started before the reaper, and four processes of the run: (driver, pids)."""
    started = []

    def start(end: str) -> tuple[subprocess.Popen[str], list[int]]:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER.replace("{end}", end)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        started.append((driver, pids))
        assert len(pids) == 5 and all(is_running(pid) for pid in pids)
        return driver, pids

    yield start
    for driver, pids in started:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        driver.stdin.close()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_everything_of_the_run_ends_with_a_driver_that_is_killed(start_driver) -> None:
    driver, (before, *family) = start_driver("time.sleep(600)")
    driver.kill()
    assert has_ended(*family)
    assert is_running(before)


def test_remaining_processes_are_killed_before_the_driver_continues(start_driver) -> None:
    driver, (before, *family) = start_driver("sys.stdin.readline()")
    driver.stdin.write("end\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "left\n"
    assert not [pid for pid in family if is_running(pid)]
    assert is_running(before) and driver.poll() is None


def test_the_reaper_survives_a_kill_of_the_drivers_group_and_stop_signals(start_driver) -> None:
    driver, (_, *family) = start_driver("os.setpgid(0, 0); print('group', flush=True); time.sleep(600)")
    assert driver.stdout.readline() == "group\n"
    for pid in map(int, Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()):
        if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
    os.killpg(driver.pid, signal.SIGKILL)
    assert has_ended(*family)


def test_the_mark_is_in_the_environment_during_the_run_only(monkeypatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "an outer run")
    with Reaper() as reaper:
        assert os.environ[MARK_VARIABLE] == str(reaper.directory)
        bystander = subprocess.Popen(["sleep", "600"], env={MARK_VARIABLE: "an outer run"})
    assert os.environ[MARK_VARIABLE] == "an outer run"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


FILES = """
import multiprocessing, os, subprocess, sys, tempfile, time
from pathlib import Path
from telescope.cluster.reaper import ALSO_REMOVED, Reaper

CHILD = '''
import multiprocessing, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=100)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, "sem." + lock._semlock.name.lstrip("/"), flush=True)
time.sleep(600)
'''
theirs = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
with Reaper() as reaper:
    Path(tempfile.mkdtemp(), "socket").touch()
    Path(f"{reaper.directory}-logs").mkdir()
    (reaper.directory / f"{ALSO_REMOVED}logs").symlink_to(f"{reaper.directory}-logs")
    ours = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    print(reaper.directory, *theirs.stdout.readline().split(), *ours.stdout.readline().split(), flush=True)
    time.sleep(2)  # the reaper looks for new files
    print("looked", theirs.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_run_leaves_no_temporary_file_and_no_shared_memory() -> None:
    driver = subprocess.Popen([sys.executable, "-c", FILES], stdout=subprocess.PIPE, text=True)
    directory, *names = driver.stdout.readline().split()
    theirs, ours = ([Path("/dev/shm", name) for name in pair] for pair in (names[:2], names[2:]))
    assert all(file.exists() for file in (*theirs, *ours))
    assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
    assert len(list(Path(directory).glob("*/socket"))) == 1
    neighbor = int(driver.stdout.readline().split()[1])
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_for(lambda: not Path(directory).exists(), "the removal of the directory")
    wait_for(lambda: not any(file.exists() for file in ours), "the removal of the files")
    assert not Path(f"{directory}-logs").exists()
    assert all(file.exists() for file in theirs), "files of another process"
    os.kill(neighbor, signal.SIGTERM)
    for file in theirs:
        file.unlink(missing_ok=True)


def test_temporary_files_of_the_driver_go_to_the_run_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    with Reaper() as reaper:
        assert reaper.directory.parent == Path("/var/tmp")
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(reaper.directory)
        assert os.environ["RAY_TMPDIR"] == "/var/tmp", "where Ray notes the address of a running cluster"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith("/var/tmp/torchinductor_"), "kept for the next run"
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == "/var/tmp"
    assert "RAY_TMPDIR" not in os.environ
    assert not reaper.directory.exists()


def test_a_temporary_directory_with_a_long_path_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Paths of sockets have at most 107 bytes."""
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(long))
    assert temporary_base() == "/tmp"
    assert len("/tmp") + LONGEST_SOCKET <= SOCKET_PATH_BYTES
