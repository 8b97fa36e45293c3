"""Plain code is interrupted in time, and only then."""

import signal
import threading
import time

import pytest

from telescope.environments.deadlines import DeadlinePassed, deadline


def spin():
    while True:
        time.sleep(0.01)


def test_code_that_takes_too_long_is_interrupted():
    with pytest.raises(DeadlinePassed, match=r"within 0.05 seconds"), deadline(0.05):
        spin()


def test_code_that_catches_every_exception_is_interrupted_again():
    caught = []

    def resist():
        while len(caught) < 2:
            try:
                spin()
            except DeadlinePassed as error:
                caught.append(error)
        raise caught[-1]

    with pytest.raises(DeadlinePassed), deadline(0.05):
        resist()
    assert len(caught) == 2


def test_nothing_is_left_behind():
    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000.0)  # of whoever set one before us
    with deadline(60):
        pass
    with pytest.raises(ZeroDivisionError), deadline(60):
        print(1 / 0)
    assert signal.getsignal(signal.SIGALRM) == before
    assert 900.0 < signal.setitimer(signal.ITIMER_REAL, 0.0)[0] <= 1000.0


def test_the_earlier_of_two_deadlines_counts():
    with pytest.raises(DeadlinePassed) as raised, deadline(0.05), deadline(60):
        spin()
    assert raised.value.seconds == 0.05
    with pytest.raises(DeadlinePassed) as raised, deadline(60), deadline(0.05):
        spin()
    assert raised.value.seconds == 0.05


def test_a_deadline_inside_another_gives_it_back():
    def spin_after_a_deadline_that_was_met():
        with deadline(0.05):
            pass
        spin()

    with pytest.raises(DeadlinePassed) as raised, deadline(0.1):
        spin_after_a_deadline_that_was_met()
    assert raised.value.seconds == 0.1


def test_another_thread_is_left_alone():
    done = []

    def work():
        with deadline(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
