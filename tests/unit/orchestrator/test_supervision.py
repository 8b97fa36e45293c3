"""A failure in any loop ends the run with that error; a run in which nothing moves ends with a report."""

import asyncio
import contextlib
import gc

import pytest

from telescope.errors import DeadlineExceeded
from telescope.orchestrator import supervision
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import ChangeNotifier, Supervisor, watchdog


async def for_ever() -> None:
    await asyncio.sleep(3600)


async def fail(message: str) -> None:
    await asyncio.sleep(0.01)
    raise ZeroDivisionError(message)


async def test_a_task_that_fails_before_the_main_one_starts_is_not_lost() -> None:
    supervisor = Supervisor()
    supervisor.spawn(fail("early"), "loop")
    await asyncio.sleep(0.05)
    with pytest.raises(ZeroDivisionError, match="early"):
        await asyncio.wait_for(supervisor.run_until(for_ever()), 5)


@pytest.mark.parametrize(("seconds", "ends"), [(5.0, True), (0.01, False), (0.0, False)])
async def test_the_main_task_may_end_by_itself_within_its_grace_after_a_failure(seconds: float, ends: bool) -> None:
    supervisor, stop, done = Supervisor(), asyncio.Event(), list[str]()

    async def main() -> None:
        await stop.wait()
        await asyncio.sleep(0.05)  # the step that runs, and its checkpoint
        done.append("saved")

    def grace(error: BaseException) -> float:
        stop.set()
        done.append(str(error))
        return seconds

    supervisor.spawn(fail("in a loop"), "loop")
    with pytest.raises(ZeroDivisionError, match="in a loop"):
        await asyncio.wait_for(supervisor.run_until(main(), grace=grace), 5)
    assert done == ["in a loop", *(["saved"] if ends else [])]


async def test_a_main_task_that_fails_at_the_same_moment_leaves_no_error_of_asyncio(caplog) -> None:
    lost, supervisor = asyncio.Event(), Supervisor()

    async def fail() -> None:
        await lost.wait()
        raise ArithmeticError("a rank was lost")

    supervisor.spawn(fail(), "watch")
    asyncio.get_running_loop().call_later(0.01, lost.set)
    with contextlib.suppress(ArithmeticError):  # the traceback that pytest.raises keeps would keep the task
        await supervisor.run_until(fail())
    del supervisor
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_end_of_the_main_task_ends_the_loops() -> None:
    supervisor = Supervisor()
    loop = supervisor.spawn(for_ever(), "loop")

    async def main() -> int:
        return 7

    assert await supervisor.run_until(main()) == 7
    assert loop.cancelled()


async def test_the_watchdog_reports_what_each_component_waited_for() -> None:
    status = RunStatus("run", 10)
    status.components["trainer"] = "waiting for a batch"

    async def no_stacks() -> dict[str, str]:
        return {}

    with pytest.raises(DeadlineExceeded, match="trainer: waiting for a batch"):
        await asyncio.wait_for(watchdog(status, 0.05, no_stacks, poll_seconds=0.01), 5)


async def test_the_watchdog_does_not_end_work_with_its_own_deadline(monkeypatch) -> None:
    """A large model may take longer to load or to save than the longest answer."""
    monkeypatch.setattr(supervision, "PROGRESS_SECONDS", 0.01)
    status, supervisor = RunStatus("run", 10), Supervisor()

    async def no_stacks() -> dict[str, str]:
        return {}

    async def save() -> str:
        await asyncio.sleep(0.5)
        return "saved"

    supervisor.spawn(watchdog(status, 0.2, no_stacks, poll_seconds=0.01), "watchdog")
    assert await supervisor.run_until(supervision.with_progress(status, save())) == "saved"
    with pytest.raises(ZeroDivisionError):
        await supervision.with_progress(status, fail("a bug"))


async def test_a_waiter_sees_every_change_and_its_wait_has_a_name() -> None:
    status = RunStatus("run", 10)
    changes = ChangeNotifier(status)
    ready = False
    waiting = asyncio.create_task(changes.wait_until(lambda: ready, "batches", "16 usable groups"))
    await asyncio.sleep(0)
    assert status.components["batches"] == "waiting for 16 usable groups"
    changes.notify()
    await asyncio.sleep(0)
    assert not waiting.done()
    ready = True
    changes.notify()
    await asyncio.wait_for(waiting, 1)
