"""Exit codes in words, guarded commands, and threads that nothing waits for."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from telescope.utils.process import describe_exit, start_daemon_thread, without_proxy


@pytest.mark.parametrize(("code", "words"), [
    (0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL"),
    (-11, "was killed by SIGSEGV"), (-40, "was killed by signal 40"),
])  # fmt: skip
def test_an_exit_code_names_the_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_the_code_is_that_of_subprocess() -> None:
    ended = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    assert describe_exit(ended.returncode) == "was killed by SIGTERM"


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
