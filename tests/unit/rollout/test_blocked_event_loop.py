"""The report of user code that blocks the event loop."""

import os
import subprocess
import sys

CODE = """
import asyncio, time
from telescope.rollout import user_thread

user_thread.BLOCKED_SECONDS = {blocked}

async def rollout():
    await asyncio.sleep({free})
    time.sleep({seconds})

async def main():
    watching = asyncio.create_task(user_thread.report_blocking({until}))
    await asyncio.sleep(0.01)
    await rollout()
    {then}
    print("ended")

asyncio.run(main())
"""


def run(tmp_path, **values) -> subprocess.CompletedProcess:
    file = tmp_path / "mine.py"
    file.write_text(CODE.format(**{"then": "", **values}))
    return subprocess.run([sys.executable, file], env=os.environ, capture_output=True, text=True, timeout=60)


def test_a_blocked_event_loop_is_reported_with_its_line_and_the_fix(tmp_path):
    done = run(tmp_path, blocked=0.2, free=0, seconds=1, until=20.0)
    assert done.stdout == "ended\n"
    assert done.stderr.count("mine.py:9 blocks the event loop") == 1
    assert "Use `await asyncio.to_thread(...)`" in done.stderr


def test_a_process_whose_event_loop_stays_blocked_exits(tmp_path):
    done = run(tmp_path, blocked=0.2, free=0, seconds=60, until=0.6)
    assert (done.returncode, done.stdout) == (1, "")
    assert "mine.py:9 blocks the event loop" in done.stderr
    assert "Thread 0x" not in done.stderr


def test_an_event_loop_that_waits_is_not_reported(tmp_path):
    assert run(tmp_path, blocked=1.0, free=2.5, seconds=0, until=20.0).stderr.count("blocks") == 0


def test_a_report_that_was_cancelled_names_nothing_later(tmp_path):
    then = "watching.cancel(); await asyncio.sleep(0.05); time.sleep(1.5)"
    done = run(tmp_path, blocked=0.2, free=0, seconds=0, until=0.5, then=then)
    assert (done.returncode, done.stdout) == (0, "ended\n")
    assert "blocks" not in done.stderr
