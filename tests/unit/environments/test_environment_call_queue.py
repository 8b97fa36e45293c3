"""Which call goes where when some can run in one place only."""

import asyncio

import pytest

from telescope.environments.worker_pool.scheduling import Call, CallQueue, Rollout, WorkerState


class Place:
    def __init__(self, name):
        self.name, self.seat = name, WorkerState()


@pytest.fixture
def make_call():
    loop = asyncio.new_event_loop()

    def make(op="advance", **options):
        return Call({"env": 0, "op": op}, b"", loop.create_future(), op, **options)

    yield make
    loop.close()


def names(dispatched):
    return [(place.name, call) for place, _, call in dispatched]


def test_a_call_with_a_place_waits_for_it_and_goes_before_those_that_can_run_anywhere(make_call):
    queue, a, b = CallQueue(), Place("a"), Place("b")
    queue.costs.measured((0, "advance"), 0.0001)
    anywhere, pinned = [make_call() for _ in range(2)], make_call(place=b)
    for call in (*anywhere, pinned):
        queue.add(call)
    assert len(queue) == 3
    assert names(queue.dispatch([a, b]))[0] == ("b", pinned)
    assert len(queue) == 0 and a.seat.num_held + b.seat.num_held == 3


def test_a_place_that_is_gone_keeps_its_calls_waiting_and_no_others(make_call):
    queue, a, b = CallQueue(), Place("a"), Place("b")
    pinned, other = make_call(place=b), make_call()
    queue.add(pinned)
    queue.add(other)
    assert names(queue.dispatch([a])) == [("a", other)]
    assert names(queue.dispatch([a, b])) == [("b", pinned)]


def test_rollouts_begin_where_the_fewest_are_and_are_tied_to_that_place(make_call):
    queue, a, b = CallQueue(), Place("a"), Place("b")
    queue.costs.measured((0, "begin"), 0.0001)
    rollouts = [Rollout(n, f"r{n}") for n in range(10)]
    for rollout in rollouts:
        queue.add(make_call("begin", rollout=rollout))
    list(queue.dispatch([a, b]))
    assert (a.seat.num_rollouts, b.seat.num_rollouts) == (5, 5)
    assert {rollout.place for rollout in rollouts} == {a, b}


def test_a_beginning_that_was_taken_back_begins_elsewhere(make_call):
    queue, a, b = CallQueue(), Place("a"), Place("b")
    rollout = Rollout(1, "r")
    call = make_call("begin", rollout=rollout)
    queue.add(call)
    list(queue.dispatch([a]))
    assert (rollout.place, a.seat.num_rollouts) == (a, 1)
    queue.run_again([call])
    assert (rollout.place, a.seat.num_rollouts) == (None, 0)
    assert names(queue.dispatch([b])) == [("b", call)]
    assert (rollout.place, b.seat.num_rollouts) == (b, 1)


def test_calls_of_a_rollout_that_was_taken_back_return_to_their_place(make_call):
    queue, a, b = CallQueue(), Place("a"), Place("b")
    call = make_call("respond", place=a, rollout=Rollout(1, "r", place=a))
    queue.run_again([call])
    assert names(queue.dispatch([b])) == []
    assert names(queue.dispatch([a, b])) == [("a", call)]


def test_calls_whose_caller_went_away_are_passed_over_everywhere(make_call):
    queue, a = CallQueue(), Place("a")
    calls = [make_call(place=a), make_call(place=a), make_call(), make_call()]
    for call in calls:
        queue.add(call)
    calls[0].future.cancel()
    calls[2].future.cancel()
    queue.costs.measured((0, "advance"), 0.0001)
    assert [call for _, call in names(queue.dispatch([a]))] == [calls[1], calls[3]]


def test_withdrawing_from_a_place_takes_its_rollouts_and_leaves_the_rest(make_call):
    queue, a = CallQueue(), Place("a")
    of_rollout, plain = make_call("respond", place=a, rollout=Rollout(1, "r", place=a)), make_call(place=a)
    queue.add(of_rollout)
    queue.add(plain)
    assert queue.withdraw_at(a) == [of_rollout]
    assert names(queue.dispatch([a])) == [("a", plain)]


def test_a_failure_of_everything_reaches_every_call(make_call):
    queue, a = CallQueue(), Place("a")
    calls = [make_call(), make_call(place=a)]
    for call in calls:
        queue.add(call)
    queue.fail(RuntimeError("over"))
    assert [str(call.future.exception()) for call in calls] == ["over", "over"]
    assert len(queue) == 0
