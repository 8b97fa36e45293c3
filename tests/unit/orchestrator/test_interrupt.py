"""Stop signals: the first requests a stop, the second ends the process, and a start is cancelled."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.unit.rollout.fakes import tick

from telescope.orchestrator.status import Interrupted, RunStatus
from telescope.orchestrator.supervision import EXIT_CODE, Interrupt

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Exited(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    def ended(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("telescope.orchestrator.supervision.os._exit", ended)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield Interrupt(RunStatus("test", 10, phase="training"))
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
async def installed(interrupt: Interrupt) -> AsyncIterator[Interrupt]:
    """An interrupt that receives the signals of this process."""
    loop = asyncio.get_running_loop()
    interrupt.install(loop)
    yield interrupt
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
async def test_the_first_signal_asks_for_a_stop(installed, number, caplog):
    caplog.set_level("INFO")
    stopped = asyncio.Event()
    installed.on_first(stopped.set)
    assert not installed.requested
    os.kill(os.getpid(), number)
    await asyncio.wait_for(stopped.wait(), 5)
    assert installed.requested
    assert installed._status.phase == "stopping (Ctrl-C again: at once)", "no step runs before training"
    assert f"{number.name} was received" in caplog.text


def test_the_second_signal_ends_the_process_with_the_code_of_ctrl_c(interrupt, capfd):
    actions: list[str] = []
    interrupt.on_second(lambda: actions.append("second"))
    interrupt._signalled()
    assert not actions
    with pytest.raises(Exited) as ended:
        interrupt._signalled()
    assert ended.value.args == (EXIT_CODE,) == (130,)
    assert actions == ["second"]
    assert "at once" in capfd.readouterr().err


@pytest.mark.parametrize("doing", ["stopping after this step", "stopping"])
def test_both_signals_say_what_is_being_stopped(interrupt, doing, capfd):
    interrupt.describe_stop("stopping after this step")
    interrupt.describe_stop(doing)
    interrupt._signalled()
    assert interrupt._status.phase == f"{doing} (Ctrl-C again: at once)"
    with pytest.raises(Exited):
        interrupt._signalled()
    assert f"ended at once by a second interrupt while {doing}; the record" in capfd.readouterr().err


async def test_what_is_starting_is_cancelled_and_cleans_up(interrupt):
    steps: list[str] = []

    async def start() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    running = asyncio.create_task(interrupt.run_until_first(start()))
    await tick(3)
    interrupt._signalled()
    with pytest.raises(Interrupted):
        await running
    assert steps == ["cleaned up"]


async def test_actions_run_once_at_the_first_signal_after_which_nothing_is_started(interrupt):
    calls: list[str] = []

    async def start() -> None:
        calls.append("started")

    interrupt.on_first(lambda: calls.append("before"))
    interrupt._signalled()
    interrupt.on_first(lambda: calls.append("after"))
    with pytest.raises(Interrupted):
        await interrupt.run_until_first(start())
    assert calls == ["before", "after"]


async def test_an_undisturbed_start_returns_its_value_and_its_errors(interrupt):
    async def value() -> int:
        return 42

    async def broken() -> None:
        raise ArithmeticError("a bug")

    assert await interrupt.run_until_first(value()) == 42
    with pytest.raises(ArithmeticError):
        await interrupt.run_until_first(broken())


async def test_a_start_that_is_cancelled_for_another_reason_is_no_interrupt(interrupt):
    running = asyncio.create_task(interrupt.run_until_first(asyncio.Event().wait()))
    await tick(3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not interrupt.requested


INT, TERM, HUP = STOP_SIGNALS


@pytest.mark.parametrize(
    "numbers",
    [(INT, INT), (TERM, TERM, HUP, TERM), (HUP, HUP)],
    ids=["timeout -s INT", "a scheduler", "a lost terminal"],
)
async def test_what_repeats_its_signal_still_ends_the_run_cleanly(installed, numbers, monkeypatch):
    for number in numbers:
        os.kill(os.getpid(), number)
        await tick(3)
    assert installed._count == 1
    monkeypatch.setattr("telescope.orchestrator.supervision.ECHO_SECONDS", -1)
    with pytest.raises(Exited):
        installed._interrupted()  # Ctrl-C by an impatient person


async def test_nohup_keeps_a_run_alive_on_sighup(interrupt):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt.install(asyncio.get_running_loop())
    os.kill(os.getpid(), signal.SIGHUP)
    await tick(3)
    assert not interrupt.requested


HANGS_UP = """
import asyncio, os, signal, sys
from telescope.orchestrator.supervision import Interrupt
from telescope.orchestrator.status import RunStatus

async def main():
    interrupt = Interrupt(RunStatus("test", 10))
    interrupt.install(asyncio.get_running_loop())
    stopped = asyncio.Event()
    interrupt.on_first(stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    print("written to a terminal that is gone", flush=True)
    open(sys.argv[1], "w").write("clean end")

asyncio.run(main())
"""


def test_a_closed_terminal_does_not_break_the_clean_end(tmp_path):
    driver, terminal = os.openpty()
    ended = tmp_path / "ended"
    run = subprocess.Popen(
        [sys.executable, "-c", HANGS_UP, str(ended)], stdin=terminal, stdout=terminal, stderr=terminal,
        preexec_fn=lambda: take_terminal(terminal),
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    while b"\n" not in shown:
        shown += os.read(driver, 100)
    os.close(driver)  # the kernel sends SIGHUP
    assert run.wait(timeout=60) == 0
    assert ended.read_text() == "clean end"


def take_terminal(terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
