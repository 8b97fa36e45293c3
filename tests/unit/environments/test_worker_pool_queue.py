"""Assignment of calls to workers, when only one worker can run some of them."""

import asyncio

import pytest

from telescope.rollout.worker_pool.scheduling import Call, CallQueue, Rollout, WorkerState


class WorkerT:
    def __init__(self, name):
        self.name, self.state = name, WorkerState()


@pytest.fixture
def make_call():
    loop = asyncio.new_event_loop()

    def make(op="advance", **options):
        return Call({"env": 0, "op": op}, b"", loop.create_future(), op, **options)

    yield make
    loop.close()


def names(dispatched):
    return [(worker.name, call) for worker, _, call in dispatched]


def test_a_call_bound_to_a_worker_waits_for_it_and_goes_before_unbound_calls(make_call):
    queue, a, b = CallQueue(), WorkerT("a"), WorkerT("b")
    queue.costs.measured((0, "advance"), 0.0001)
    anywhere, pinned = [make_call() for _ in range(2)], make_call(worker=b)
    for call in (*anywhere, pinned):
        queue.add(call)
    assert len(queue) == 3
    assert names(queue.dispatch([a, b]))[0] == ("b", pinned)
    assert len(queue) == 0 and a.state.num_calls + b.state.num_calls == 3


def test_a_missing_worker_delays_only_its_own_calls(make_call):
    queue, a, b = CallQueue(), WorkerT("a"), WorkerT("b")
    pinned, other = make_call(worker=b), make_call()
    queue.add(pinned)
    queue.add(other)
    assert names(queue.dispatch([a])) == [("a", other)]
    assert names(queue.dispatch([a, b])) == [("b", pinned)]


def test_rollouts_begin_on_the_worker_with_the_fewest_and_stay_there(make_call):
    queue, a, b = CallQueue(), WorkerT("a"), WorkerT("b")
    queue.costs.measured((0, "begin"), 0.0001)
    rollouts = [Rollout(n, f"r{n}") for n in range(10)]
    for rollout in rollouts:
        queue.add(make_call("begin", rollout=rollout))
    list(queue.dispatch([a, b]))
    assert (a.state.num_rollouts, b.state.num_rollouts) == (5, 5)
    assert {rollout.worker for rollout in rollouts} == {a, b}


def test_a_withdrawn_begin_starts_on_another_worker(make_call):
    queue, a, b = CallQueue(), WorkerT("a"), WorkerT("b")
    rollout = Rollout(1, "r")
    call = make_call("begin", rollout=rollout)
    queue.add(call)
    list(queue.dispatch([a]))
    assert (rollout.worker, a.state.num_rollouts) == (a, 1)
    queue.requeue([call])
    assert (rollout.worker, a.state.num_rollouts) == (None, 0)
    assert names(queue.dispatch([b])) == [("b", call)]
    assert (rollout.worker, b.state.num_rollouts) == (b, 1)


def test_requeued_calls_of_a_rollout_return_to_their_worker(make_call):
    queue, a, b = CallQueue(), WorkerT("a"), WorkerT("b")
    call = make_call("respond", worker=a, rollout=Rollout(1, "r", worker=a))
    queue.requeue([call])
    assert names(queue.dispatch([b])) == []
    assert names(queue.dispatch([a, b])) == [("a", call)]


def test_cancelled_calls_are_skipped(make_call):
    queue, a = CallQueue(), WorkerT("a")
    calls = [make_call(worker=a), make_call(worker=a), make_call(), make_call()]
    for call in calls:
        queue.add(call)
    calls[0].future.cancel()
    calls[2].future.cancel()
    queue.costs.measured((0, "advance"), 0.0001)
    assert [call for _, call in names(queue.dispatch([a]))] == [calls[1], calls[3]]


def test_withdrawing_rollout_calls_leaves_the_others(make_call):
    queue, a = CallQueue(), WorkerT("a")
    of_rollout, plain = make_call("respond", worker=a, rollout=Rollout(1, "r", worker=a)), make_call(worker=a)
    queue.add(of_rollout)
    queue.add(plain)
    assert queue.withdraw_rollout_calls(a) == [of_rollout]
    assert names(queue.dispatch([a])) == [("a", plain)]


def test_a_failure_of_the_pool_reaches_every_call(make_call):
    queue, a = CallQueue(), WorkerT("a")
    calls = [make_call(), make_call(worker=a)]
    for call in calls:
        queue.add(call)
    queue.fail(RuntimeError("over"))
    assert [str(call.future.exception()) for call in calls] == ["over", "over"]
    assert len(queue) == 0
