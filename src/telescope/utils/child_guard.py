"""Kills an engine's processes when the process that started them exits.

Owns `die_with`, which is called inside every vLLM process, and the shim between `InferenceServer` and vLLM, which is
run with `python -m`. Imports only the standard library, because the shim stays in memory beside every server.

The shim leads a new session, hence one process group for the whole engine. It polls its parent's pid, so the group is
killed however the supervisor exits, even by SIGKILL. Linux's parent-death signal does not suffice there, because it
fires when the *thread* that started the child ends. The shim has one thread, so the signal does suffice for the command
that the shim starts. If the shim itself is killed, that signal ends the command at any point of its start, and
`die_with` ends the other processes of the engine.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

from telescope.utils.process import describe_exit

SUPERVISOR_PID_VARIABLE = "TELESCOPE_ENGINE_SUPERVISOR_PID"
"""Environment variable with the pid of the shim, set in every process of the engine."""

POLL_SECONDS = 0.2
MAX_SCANS = 100
"""How often processes are searched for. One that is found may have started another meanwhile."""

_PR_SET_PDEATHSIG = 1


def die_with(pid: int) -> None:
    """Kills this process when process `pid` exits.

    A daemon thread waits on a pidfd. Kernels without pidfds (before 5.3, some sandboxes) are polled every second.
    """

    def wait_for_end() -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(pid, 0)
                    time.sleep(1.0)
        else:
            select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="telescope-child-guard", daemon=True).start()


_prctl = ctypes.CDLL(None).prctl  # looked up here, because little is allowed after a fork


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent thread ends. `parent` is the process of that thread.

    In contrast to `die_with`, this works while the process cannot run threads, and after a fork.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already


def kill_group(group: int) -> None:
    """Sends SIGKILL to every process of the group. A group that is already gone is not an error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def values_of_variable(variable: str) -> Iterator[tuple[int, bytes]]:
    """Yields pid and value of the processes of this user that were started with an environment variable."""
    start = variable.encode() + b"="
    for name in filter(str.isdigit, os.listdir("/proc")):
        environ = b""
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # OSError: it has ended
            environ = file.read()
        if start in environ:
            yield from ((int(name), entry[len(start) :]) for entry in environ.split(b"\0") if entry.startswith(start))


def kill_by_variable(variable: str, word: str) -> None:
    """Kills the processes that were started with `word` in the value of a variable, whatever their session."""
    killed: set[int] = set()
    for _ in range(MAX_SCANS):
        found = {pid for pid, value in values_of_variable(variable) if word.encode() in value.split()} - killed
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _prepare_command(parent: int, signals: set[int | signal.Signals]) -> None:
    """Ends the command with its parent, and blocks only `signals` in it. Runs between fork and exec."""
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def main(argv: list[str]) -> int:
    """Runs `PARENT_PID COMMAND...` until the command or the parent ends."""
    parent, command = int(argv[0]), argv[1:]
    environment = {**os.environ, SUPERVISOR_PID_VARIABLE: str(os.getpid())}
    # A SIGTERM that arrives before there is a handler waits for it, otherwise it would kill the command with the shim.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=partial(_prepare_command, os.getpid(), blocked))
    except OSError as error:
        sys.stderr.write(f"telescope: {error}\n")  # names the program
        return 127
    # SIGTERM goes to the engine, which shuts down by itself; the supervisor kills it after a grace period.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    code = None
    while code is None:
        time.sleep(POLL_SECONDS)
        code = child.poll()  # before checking the parent: a command that reads from the parent ends with it
        if os.getppid() != parent:
            kill_group(os.getpgid(0))
            time.sleep(60)  # killed with the group
    if code not in (0, -signal.SIGTERM):  # it finished, or was told to end
        sys.stderr.write(f"telescope: process {child.pid} {describe_exit(code)}\n")
        sys.stderr.flush()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
