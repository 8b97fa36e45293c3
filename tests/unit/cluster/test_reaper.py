"""Nothing outlives the driver: with small processes in place of Ray and vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope.cluster.reaper import MARK_VARIABLE, Reaper

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
        "print(child.pid, flush=True)\\ntime.sleep(2)", stdout=subprocess.PIPE, text=True)
    orphaned = int(orphan.stdout.readline())
    orphan.wait()
    print(before.pid, child.pid, daemon.pid, grandchild, orphaned, flush=True)
    {end}
print("left", flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


@pytest.fixture
def start_driver() -> Iterator:
    """A driver with a child that it started before the reaper, and four processes of the run: (driver, pids)."""
    started = []

    def start(end: str) -> tuple[subprocess.Popen[str], list[int]]:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER.replace("{end}", end)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert driver.stdout is not None
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
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_everything_of_the_run_ends_with_a_driver_that_is_killed(start_driver) -> None:
    driver, (before, *family) = start_driver("time.sleep(600)")
    driver.kill()
    wait_until_gone(family)
    assert is_running(before)


def test_what_is_left_at_the_end_of_the_run_is_killed_before_the_driver_goes_on(start_driver) -> None:
    driver, (before, *family) = start_driver("sys.stdin.readline()")
    driver.stdin.write("end\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "left\n"
    assert not [pid for pid in family if is_running(pid)]
    assert is_running(before) and driver.poll() is None


def test_the_reaper_survives_the_kill_of_the_drivers_group_and_polite_signals(start_driver) -> None:
    driver, (_, *family) = start_driver("os.setpgid(0, 0); print('group', flush=True); time.sleep(600)")
    assert driver.stdout.readline() == "group\n"
    for pid in map(int, Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()):
        if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
    os.killpg(driver.pid, signal.SIGKILL)
    wait_until_gone(family)


def test_the_mark_is_in_the_environment_during_the_run_only(monkeypatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "an outer run")
    with Reaper() as reaper:
        assert os.environ[MARK_VARIABLE] == reaper.mark
        bystander = subprocess.Popen(["sleep", "600"], env={MARK_VARIABLE: "an outer run"})
    assert os.environ[MARK_VARIABLE] == "an outer run"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
