"""Synchronous code is interrupted at its deadline, and only then."""

import asyncio
import threading
import time

import pytest

from telescope.environments.user_code import DeadlinePassed, deadline, describe_error, within


def spin():
    while True:
        time.sleep(0.01)


def test_code_that_catches_every_exception_is_interrupted_again():
    caught = []

    def resist():
        while len(caught) < 2:
            try:
                spin()
            except DeadlinePassed as error:
                caught.append(error)
        raise caught[-1]

    with pytest.raises(DeadlinePassed) as raised, deadline(0.05):
        resist()
    assert len(caught) == 2
    assert describe_error(raised.value).startswith("DeadlinePassed: did not end within 0.05 seconds")


def test_nothing_is_left_behind():
    before = threading.active_count()
    with deadline(60):
        pass
    with pytest.raises(ZeroDivisionError), deadline(60):
        print(1 / 0)
    time.sleep(0.05)
    assert threading.active_count() == before


@pytest.mark.parametrize(("outer", "inner"), [(0.05, 60), (60, 0.05)])
def test_the_earlier_of_two_deadlines_counts(outer, inner):
    with pytest.raises(DeadlinePassed, match=r"within 0.05 seconds") as raised, deadline(outer), deadline(inner):
        spin()
    assert raised.value.seconds == 0.05


def test_an_inner_deadline_restores_the_outer_one():
    def spin_after_a_deadline_that_was_met():
        with deadline(0.9):
            pass
        spin()

    with pytest.raises(DeadlinePassed) as raised, deadline(1.0):
        spin_after_a_deadline_that_was_met()
    assert raised.value.seconds == 1.0


def test_code_of_another_thread_is_interrupted_too():
    seconds = []

    def work():
        for limit, code in ((5.0, int), (0.05, spin)):
            try:
                with deadline(limit):
                    code()
            except DeadlinePassed as error:
                seconds.append(error.seconds)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seconds == [0.05]


async def test_a_coroutine_that_takes_too_long_is_cancelled():
    cancelled = []

    async def doze():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(DeadlinePassed, match=r"within 0.05 seconds"):
        await within(0.05, doze())
    assert cancelled == [True]


async def test_a_coroutine_is_not_charged_for_time_in_which_other_code_blocks_the_loop():
    async def nap():
        for _ in range(4):
            await asyncio.sleep(0.01)
        return "awake"

    async def hold_the_loop():
        for _ in range(4):
            time.sleep(0.3)  # noqa: ASYNC251  (what plain code of another rollout does)
            await asyncio.sleep(0)

    slept, _ = await asyncio.gather(within(0.6, nap()), hold_the_loop())
    assert slept == "awake"


async def test_errors_of_the_coroutine_are_raised():
    async def fail():
        raise KeyError("of the tool's own")

    with pytest.raises(KeyError, match="own"):
        await within(1.0, fail())
