"""Helpers around processes: log files, garbage collection, stacks, exit codes, threads.

Log files are for the output of child processes. A failing disk or a removed folder prevents neither the start of a
process nor the report of its exit.

A full garbage collection visits every object of the process. With torch, transformers and Ray loaded it takes hundreds
of milliseconds, in which the driver's event loop reads no response, or a trainer rank keeps the others waiting. Nearly
all of these objects exist before the work begins and are never freed, so they are excluded.
"""

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

T = TypeVar("T")

THRESHOLDS = (1_000, 3, 8_000)
"""Thresholds of the driver, where few objects are in cycles. Containers created and not freed before a young
collection; young collections before a middle one; middle ones before a full one. With thousands of samples in flight
nearly all containers are alive at a collection, so a middle one visits 1,000 x 5 containers at about 1 us each, and a
full one runs at most every 32 million. Python's own: (700, 10, 10)."""


def freeze_heap() -> None:
    """Collects garbage once, then excludes all live objects from later collections, until `unfreeze_heap`."""
    unfreeze_heap()
    gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Lets later collections visit all objects again, so that cycles are freed."""
    gc.unfreeze()


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Excludes existing objects and makes full collections rare. Undone when the block ends."""
    before = gc.get_threshold()
    freeze_heap()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        unfreeze_heap()


def thread_stacks() -> str:
    """Returns the stacks of every thread, as the interpreter's fault handler prints them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def describe_exit(code: int) -> str:
    """Returns the end of a process in words: "ended with exit code 3", "was killed by SIGKILL".

    `code` is as `subprocess` reports it, negative for a signal.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # real-time signals have no names
        name = f"signal {-code}"
    return f"was killed by {name}"


def without_proxy(host: str) -> dict[str, str]:
    """Returns variables of the environment with which a process reaches `host` directly, also behind a proxy."""
    names = ("no_proxy", "NO_PROXY")  # clients read one or the other
    hosts = [each.strip() for name in names for each in os.environ.get(name, "").split(",") if each.strip()]
    return dict.fromkeys(names, "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, host])))


def start_daemon_thread(function: Callable[[], T], name: str, *, stays: bool = False) -> Future[T]:
    """Runs `function` on a thread that nothing waits for at exit, in contrast to threads of `asyncio.to_thread`.

    A thread that `stays` ends with the process, because the kernel ends child processes such as Ray's daemons with the
    thread that started them.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a cancelled caller does not cancel `function`

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
        if stays:
            threading.Event().wait()

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


logger = logging.getLogger(__name__)


def open_log(path: Path) -> BinaryIO:
    """Opens the file for appending and makes its folder. On an error, warns and returns a sink."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written (%s): its output is lost", path, error.strerror or error)
        return open(os.devnull, "ab")


def log_size(path: Path) -> int:
    """Returns the number of bytes in the file, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def rotate_log(path: Path, max_bytes: int) -> None:
    """Keeps a longer log's last `max_bytes` in `<path>.1`, and empties it.

    Processes that have the file open for appending continue at its start. Output written during the rotation may be
    lost.
    """
    if log_size(path) <= max_bytes:
        return
    rotated = path.with_name(f"{path.name}.1")
    try:
        with path.open("rb") as log:
            log.seek(-max_bytes, os.SEEK_END)
            rotated.write_bytes(log.read(max_bytes))
    except OSError as error:
        logger.warning("%s cannot be written (%s): its output is lost", rotated, error.strerror or error)
    os.truncate(path, 0)


def log_tail(path: Path, num_bytes: int, *, start: int = 0) -> str:
    """Returns the last `num_bytes` written after byte `start`, as text. Empty if they cannot be read."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - num_bytes) if start <= end else max(0, end - num_bytes))
            return log.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def ignore_sigterm() -> None:
    """Ignores SIGTERM in this process, but not in programs that it starts. The driver handles it for all processes."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Blocks SIGTERM on this thread, so that programs started in the block ignore it despite their own handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP ends the command. In contrast to other exits, it is no error of the user code around it."""


def _terminate(number: int, _frame: object) -> NoReturn:
    raise Terminated(128 + number)


def run_and_exit(command: Callable[[], int]) -> NoReturn:
    """Runs `command` and exits with its code. An exception prints a traceback and exits with code 1.

    SIGTERM and SIGHUP end it with 128 plus their number, after it has removed its temporary files. A run has its own
    handlers.

    Ray leaves native threads behind after `ray.shutdown()`. One of them
    (`opencensus::stats::DeltaProducer::RunHarvesterLoop`) wakes every few seconds and crashes the process if the C++
    runtime is destroying its globals then. So a process that has loaded Ray exits without that phase, after all of
    Python's clean-up: non-daemon threads are joined, `atexit` handlers run, standard output and error are flushed.
    """
    code = 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)

    def leave() -> None:
        if "ray" in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                # The reader of the output (`head`, a pager) may have exited.
                with contextlib.suppress(BrokenPipeError):
                    if not stream.closed:
                        stream.flush()
            os._exit(code)

    # Handlers run in reverse order of registration: this one is registered first and runs last.
    atexit.register(leave)
    code = command()
    sys.exit(code)
