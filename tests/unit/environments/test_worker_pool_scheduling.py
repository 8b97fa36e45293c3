"""Scheduling of calls, their deadlines, and the call that ended a worker."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.rollout.worker_pool.scheduling import (
    AHEAD_SECONDS,
    MAX_QUEUED,
    Call,
    Costs,
    ExitCause,
    Rollout,
    WorkerState,
)
from telescope.rollout.worker_pool.worker_handle import PoolWorker


@pytest.fixture
def make_call():
    loop = asyncio.new_event_loop()
    yield lambda cost=0.0: Call({"env": 0, "op": "advance"}, b"", loop.create_future(), "a call", expected_seconds=cost)
    loop.close()


def state_with(calls):
    state = WorkerState()
    for call_id, call in enumerate(calls, start=1):
        state.sent(call_id, call)
    return state


def test_cheap_calls_are_sent_ahead_and_expensive_ones_one_at_a_time(make_call):
    state = WorkerState()
    assert state.admits(100.0)
    state.sent(1, make_call(AHEAD_SECONDS))
    assert not state.admits(0.001)
    cheap = state_with([make_call(0.0001) for _ in range(MAX_QUEUED - 1)])
    assert cheap.admits(0.0001)
    cheap.sent(100, make_call(0.0001))
    assert not cheap.admits(0.0001)


def test_a_call_that_waits_in_the_event_loop_frees_the_main_thread(make_call):
    state = state_with([make_call(1.0)])
    assert not state.admits(1.0)
    state.park(1)
    assert state.admits(1.0)


def test_the_deadline_of_a_queued_call_does_not_run(make_call):
    first, second = make_call(), make_call()
    state = state_with([first, second])
    for _ in range(10):
        state.charge((1, 1), 1.0)
    assert (first.used_seconds, second.used_seconds) == (10.0, 0.0)
    assert state.overdue(5.0) == [(1, first)]


def test_a_waiting_call_is_not_charged_for_one_that_blocks_the_thread(make_call):
    waiting, blocking = make_call(), make_call()
    state = state_with([waiting, blocking])
    state.park(1)
    state.charge((0, 1), 1.0)
    for _ in range(5):
        state.charge((2, 2), 1.0)
    assert waiting.used_seconds == 2.0  # while alone, and in the tick in which the other began
    assert blocking.used_seconds == 5.0


def test_an_idle_worker_that_does_not_start_its_call_is_detected(make_call):
    call = make_call()
    state = state_with([call])
    for _ in range(5):
        state.charge((0, 0), 1.0)
    assert state.overdue(5.0) == [(1, call)]


def test_calls_behind_a_slow_one_are_withdrawn(make_call):
    calls = [make_call() for _ in range(4)]
    state = state_with(calls)
    state.answered(1)
    state.charge((2, 2), 0.05)
    state.charge((2, 2), 0.05)
    assert list(state.withdraw_queued().values()) == calls[2:]
    assert list(state.queued.values()) == [calls[1]]


def test_calls_of_a_rollout_are_not_withdrawn(make_call):
    """The worker may start one before it receives the withdrawal, and then the turn would run twice."""
    slow, begin, respond, pinned, plain = (make_call() for _ in range(5))
    begin.rollout = respond.rollout = Rollout(1, "a rollout")
    respond.worker = pinned.worker = object()
    state = state_with([slow, begin, respond, pinned, plain])
    state.charge((1, 1), 0.05)
    state.charge((1, 1), 0.05)
    assert list(state.withdraw_queued().values()) == [plain]
    assert list(state.queued.values()) == [slow, begin, respond, pinned]


def test_time_of_a_call_withdrawn_too_late_is_counted(make_call):
    state = state_with([make_call(), make_call()])
    state.charge((1, 1), 1.0)
    state.withdraw_queued()
    state.answered(1)
    state.charge((2, 2), 1.0)
    state.charge((2, 2), 1.0)
    state.charge((2, 2), 1.0)
    assert state.unowned_seconds == 2.0


def test_the_call_on_the_main_thread_caused_the_exit(make_call):
    waiting, running, queued = make_call(), make_call(), make_call()
    state = state_with([waiting, running, queued])
    state.park(1)
    culprit, others = state.worker_ended((2, 2), ExitCause.BY_ITSELF)
    assert culprit is running
    assert others == [waiting, queued]
    assert [call.worker_exits for call in others] == [0, 0]
    assert state.num_calls == 0


def test_an_external_signal_is_counted_on_the_call_on_the_main_thread_only(make_call):
    waiting, running, queued = make_call(), make_call(), make_call()
    state = state_with([waiting, running, queued])
    state.park(1)
    assert state.worker_ended((2, 2), ExitCause.BY_SIGNAL) == (None, [waiting, running, queued])
    assert [call.worker_exits for call in (waiting, running, queued)] == [0, 1, 0]


def test_an_exit_while_all_calls_wait_counts_on_each(make_call):
    waiting, queued = make_call(), make_call()
    state = state_with([waiting, queued])
    state.park(1)
    assert state.worker_ended((0, 1), ExitCause.BY_ITSELF) == (None, [waiting, queued])
    assert waiting.worker_exits == 1


def test_an_exit_during_an_answer_counts_on_the_first_in_the_queue(make_call):
    """Otherwise a call whose answer ends its process would run again forever."""
    answering, queued = make_call(), make_call()
    state = state_with([answering, queued])
    assert state.worker_ended((0, 2), ExitCause.BY_ITSELF) == (None, [answering, queued])
    assert (answering.worker_exits, queued.worker_exits) == (1, 0)


def test_a_kill_by_the_pool_counts_on_no_call(make_call):
    waiting, running = make_call(), make_call()
    state = state_with([waiting, running])
    state.park(1)
    assert state.worker_ended((2, 2), ExitCause.BY_POOL) == (None, [waiting, running])
    assert waiting.worker_exits == 0


def test_the_end_of_the_fork_server_counts_on_started_calls(make_call):
    waiting, running, queued = make_call(), make_call(), make_call()
    state = state_with([waiting, running, queued])
    state.park(1)
    assert state.worker_ended((2, 2), ExitCause.WITH_SERVER) == (None, [waiting, running, queued])
    assert [call.worker_exits for call in (waiting, running, queued)] == [1, 1, 0]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("from_outside", [False, True])
def test_a_call_fails_with_its_process_only_if_it_caused_the_exit(make_call, killed, lost, from_outside):
    call = make_call()
    worker = PoolWorker(0)
    worker.attach(
        SimpleNamespace(
            slot=SimpleNamespace(read=lambda: (1, 1)),
            is_lost=lost,
            killed_externally=from_outside,
            describe_end=lambda: "exited with 3",
        )
    )
    worker.state.sent(1, call)
    worker.killed = killed
    blamed = not (killed or lost or from_outside)
    assert worker.process_ended() == ([] if blamed else [call])
    assert call.future.done() == blamed
    assert call.worker_exits == (0 if blamed or killed else 1)
    if blamed:
        assert "exited with 3" in str(call.future.exception())


def test_expected_costs_rise_fast_and_fall_slowly():
    costs = Costs()
    costs.measured((0, "advance"), 0.001)
    costs.measured((0, "advance"), 1.0)
    assert costs.expected((0, "advance")) > 0.5
    costs.measured((0, "advance"), 0.001)
    assert costs.expected((0, "advance")) > 0.4
    assert costs.expected((0, "prepare")) != costs.expected((0, "advance"))


@given(st.lists(st.sampled_from(["send", "park", "answer", "withdraw", "charge"]), max_size=60), st.randoms())
def test_no_call_is_lost_or_sent_twice(steps, rng):
    loop = asyncio.new_event_loop()
    state, calls, last_id = WorkerState(), {}, 0
    for step in steps:
        if step == "send":
            last_id += 1
            calls[last_id] = Call({"env": 0, "op": "x"}, b"", loop.create_future(), "", expected_seconds=rng.random())
            state.sent(last_id, calls[last_id])
        elif step == "charge":
            state.charge((rng.choice([0, *calls]), rng.randint(0, 3)), 1.0)
        elif step == "withdraw":
            for call_id, call in state.withdraw_queued().items():
                assert calls.pop(call_id) is call
        elif calls:
            call_id = rng.choice(list(calls))
            if step == "park":
                state.park(call_id)
            else:
                assert state.answered(call_id) is calls.pop(call_id)
        assert {**state.queued, **state.parked} == calls
        assert state.expected_seconds == pytest.approx(sum(c.expected_seconds for c in state.queued.values()))
    culprit, others = state.worker_ended((0, 0), ExitCause.BY_ITSELF)
    assert culprit is None
    assert others == [calls[call_id] for call_id in sorted(calls)]
    loop.close()
