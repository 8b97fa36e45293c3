"""A rollout worker and its pool: when a report comes, and what a failure of one caller or server leaves."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.rollout.fakes import FakeEngine, FakeEnvironments, settings, task

from telescope.environments.types import Advance
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.exchange import TRAINING, GroupTask, LaneState, Orders, Report, WorkerLost
from telescope.rollout.pool import RolloutPool, RunningGroup
from telescope.rollout.trajectory import Trajectory
from telescope.rollout.worker import RolloutWorker


def simulated(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on simulated time."""

    @wraps(test)
    def run() -> None:
        run_simulated(test())

    return run


class Prompts(FakeEnvironments):
    """Renders no prompt: the caller gets an error, after as many seconds as the item says."""

    async def prepare(self, env_key: str, index: int) -> None:
        await asyncio.sleep(index)
        raise EnvironmentFailure(f"item {index}")


class Unlucky:
    """A worker that is lost whenever it has groups. Then its environments run in worker 1, if `homes` is given."""

    def __init__(self, homes: list[int] | None = None) -> None:
        self.homes = homes

    async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
        if orders.is_empty:
            await asyncio.sleep(3600)
        if orders.groups:
            await asyncio.sleep(1)
            raise WorkerLost("gone")
        return Report(lanes={TRAINING: LaneState([0], 4)})

    async def restart(self) -> None:
        await asyncio.sleep(1)
        if self.homes:
            self.homes[:] = [1]


def now() -> float:
    return asyncio.get_running_loop().time()


def prompts(*seconds: int) -> Orders:
    return Orders(prompts=[(number, "e", each) for number, each in enumerate(seconds)])


async def reports(orders: Orders, **waits: float) -> list[tuple[float, int]]:
    """When reports come of a worker that prepares prompts, and how many prompts each has."""
    worker = RolloutWorker(Prompts(), [])
    await worker.exchange(orders)
    found = []
    while sum(number for _, number in found) < len(orders.prompts):
        report = await worker.exchange(Orders(), **waits)
        found.append((now(), len(report.prompts)))
    return found


@pytest.mark.parametrize(
    ("orders", "waits", "expected"),
    [
        (prompts(3, 5), {}, [(3, 1), (5, 1)]),
        (prompts(3, 4, 5), {"interval": 2.5}, [(3, 1), (5.5, 2)]),
        (prompts(3), {"seconds": 2.0}, [(2, 0), (3, 1)]),
        (prompts(*[3] * 40, 4, *[5] * 40), {"interval": 60.0}, [(3, 40), (5, 41)]),
    ],
    ids=["at the first event", "not soon after the last one", "at the latest after some time", "at once with many"],
)
def test_a_report_comes(orders: Orders, waits: dict[str, float], expected: list[tuple[float, int]]) -> None:
    assert run_simulated(reports(orders, **waits)) == expected


@simulated
async def test_orders_are_answered_at_once_and_end_a_call_that_waits() -> None:
    worker = RolloutWorker(Prompts(), [])
    waiting = asyncio.create_task(worker.exchange(Orders(), seconds=60.0))
    await asyncio.sleep(1)
    ordered = await worker.exchange(Orders(lanes={TRAINING: [4]}, servers={(TRAINING, 0): True}))
    assert now() == 1
    assert (await waiting).lanes == ordered.lanes and ordered.lanes[TRAINING].num_free == 4


@simulated
async def test_a_server_that_failed_is_closed_until_it_is_ordered_to_be_up() -> None:
    worker = RolloutWorker(FakeEnvironments(), [FakeEngine(answers=[InfrastructureError("gone")])])
    group = GroupTask(7, {0: task()}, settings(slot_timeout=100.0))
    up = {(TRAINING, 0): True}
    ordered = await worker.exchange(Orders(lanes={TRAINING: [2]}, servers=up, groups=[group]))
    waited = await worker.exchange(Orders(), seconds=50.0, interval=1.0)
    failures = [*ordered.failures, *waited.failures]
    assert [(lane, server) for lane, server, _ in failures] == [(TRAINING, 0)]
    assert waited.lanes[TRAINING].num_free == 0 and not waited.samples
    reports = [await worker.exchange(Orders(servers=up)), await worker.exchange(Orders(), seconds=1.0)]
    assert [(key, index) for report in reports for key, index, _ in report.samples] == [(7, 0)]


@simulated
async def test_a_prompt_whose_caller_was_cancelled_ends_nobody_elses() -> None:
    pool = RolloutPool([RolloutWorker(Prompts(), [])])
    cancelled = asyncio.create_task(pool.prepare("e", 1))
    other = asyncio.create_task(pool.prepare("e", 2))
    await asyncio.sleep(0.5)
    cancelled.cancel()
    with pytest.raises(EnvironmentFailure, match="item 2"):
        await other
    await pool.close()


@simulated
async def test_a_prompt_is_rendered_where_no_sample_runs() -> None:
    class Named(Prompts):
        async def prepare(self, env_key: str, index: int) -> None:
            rendered.append((env_key, self.first_prompt, index))
            await super().prepare(env_key, index)

    rendered: list[Any] = []

    slow = {"on_call": lambda: asyncio.sleep(10)}
    pool = RolloutPool([RolloutWorker(Named(first_prompt=[n], **slow), [FakeEngine()]) for n in range(2)])
    pool.open_lane(TRAINING, [4]).set_up(0, True)
    group = asyncio.create_task(pool.run([task()], settings()))
    await asyncio.sleep(1)
    for item in (1, 2):
        with pytest.raises(EnvironmentFailure):
            await pool.prepare("e", item)
    await group
    with pytest.raises(EnvironmentFailure):
        await pool.prepare("e", 3)
    await pool.close()
    assert rendered == [("e", [1], 1), ("e", [1], 2), ("e", [0], 3)]


@simulated
async def test_a_prompt_that_ends_three_workers_fails_alone() -> None:
    class Fragile:
        """Renders a prompt a second, one after the other. Item 3 ends it."""

        num_lost = 0

        def __init__(self) -> None:
            self.left: list[tuple[int, str, int]] = []

        async def exchange(self, orders: Orders, *, seconds: float | None = None, interval: float = 0.0) -> Report:
            self.left += orders.prompts
            if not orders.is_empty:
                return Report()
            await asyncio.sleep(1)
            if self.left and self.left[0][2] == 3:
                Fragile.num_lost += 1
                raise WorkerLost("killed by SIGSEGV")
            rendered, self.left = self.left[:1], self.left[1:]
            return Report(prompts=[(number, EnvironmentFailure(f"rendered {item}")) for number, _, item in rendered])

        async def restart(self) -> None:
            self.left = []
            await asyncio.sleep(1)

    pool = RolloutPool([Fragile(), Fragile()])
    calls = [pool.prepare("e", item) for item in range(8)]
    async with asyncio.timeout(100):
        found = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
    assert found.pop(3) == (
        "environment 'e', item 3: 3 rollout workers ended while they rendered the prompt; the last one: killed by "
        "SIGSEGV"
    )
    assert found == [f"rendered {item}" for item in range(8) if item != 3]
    assert Fragile.num_lost == 3
    await pool.close()


@simulated
async def test_a_group_whose_lane_ends_before_it_begins_is_cancelled() -> None:
    worker = RolloutWorker(FakeEnvironments(), [FakeEngine()])
    group = GroupTask(7, {0: task()}, settings(), "eval 0")
    reports = [await worker.exchange(Orders(lanes={"eval 0": None}, groups=[group], cancelled=[7]))]
    reports.append(await worker.exchange(Orders(), seconds=1.0))
    (sample,) = [sample for report in reports for *_, sample in report.samples]
    assert isinstance(sample, Trajectory) and sample.cancelled


@simulated
async def test_the_workers_of_a_lost_server_get_slots_of_those_that_are_left() -> None:
    engines = [FakeEngine(wait=lambda: asyncio.sleep(1)) for _ in range(2)]
    pool = RolloutPool([RolloutWorker(FakeEnvironments(), engines) for _ in range(2)])
    lane = pool.open_lane(TRAINING, [2, 2])
    assert [worker.shares[TRAINING] for worker in pool.workers] == [[2, 0], [0, 2]]
    lane.set_up(0, True)
    running = [asyncio.create_task(pool.run([task()], settings(slot_timeout=100.0))) for _ in range(6)]
    await asyncio.sleep(0.5)
    lane.share_slots_of({0})
    await asyncio.gather(*running)
    assert len(engines[0].requests) == 6 and now() == 3.5, "the three of the second worker begin half a second later"
    await pool.close()


@simulated
async def test_the_workers_that_run_an_environment_have_all_slots_also_after_a_move() -> None:
    homes = [0]
    engines = [FakeEngine(wait=lambda: asyncio.sleep(4)) for _ in range(2)]
    pool = RolloutPool([Unlucky(homes), RolloutWorker(FakeEnvironments(), engines)], homes=lambda key: homes)
    lane = pool.open_lane(TRAINING, [4, 4], 1, keys=[("arithmetic#1", 1.0)])
    for server in range(2):
        lane.set_up(server, True)
    shares = [worker.shares[TRAINING] for worker in pool.workers]
    assert shares == [[4, 4], [0, 0]]
    samples = await asyncio.gather(*(pool.run([task()], settings(slot_timeout=100.0)) for _ in range(8)))
    assert [sample.num_infrastructure_retries for (sample,) in samples] == [1] * 8
    assert now() == 6, "all of them run at once, in the other worker"
    assert [worker.shares[TRAINING] for worker in pool.workers] == [[1, 0], [4, 4]]
    await pool.close()


def test_an_environment_that_runs_in_one_worker_has_slots_by_its_weight() -> None:
    workers: list[Any] = [None] * 4
    pool = RolloutPool(workers, homes=lambda key: [0] if key == "host" else range(4))
    pool.open_lane(TRAINING, [128, 128], 8, keys=[("free", 2.0), ("host", 1.0), ("too", 1.0)])
    assert [worker.shares[TRAINING] for worker in pool.workers] == [[56, 56], [24, 24], [24, 24], [24, 24]]


@simulated
async def test_a_turn_of_a_long_rollout_is_progress() -> None:
    environments = FakeEnvironments([Advance([20])] * 3, turns=True)
    pool = RolloutPool([RolloutWorker(environments, [FakeEngine(wait=lambda: asyncio.sleep(1000))])], seconds=1.0)
    progress: list[int] = []
    pool.on_progress = lambda: progress.append(round(now(), -3))
    pool.open_lane(TRAINING, [1]).set_up(0, True)
    await pool.run([task()], settings(slot_timeout=100.0))
    assert sorted(set(progress)) == [0, 1000, 2000, 3000] and now() == 4000
    await pool.close()


@simulated
async def test_a_suspected_group_ends_at_once_when_it_is_cancelled_while_another_runs() -> None:
    pool = RolloutPool([Unlucky()])
    pool.open_lane(TRAINING, [4]).set_up(0, True)
    ended: list[tuple[str, float, bool]] = []

    def start(name: str) -> RunningGroup:
        def on_sample(_: int, sample: Trajectory | BaseException) -> None:
            assert isinstance(sample, Trajectory)
            ended.append((name, now(), sample.cancelled))

        return pool.start([task()], settings(), on_sample)

    groups = [start("first"), start("second")]
    await asyncio.sleep(4.5)  # both were in the worker twice when it was lost
    groups[1].cancel()
    assert ended == [("second", 4.5, True)]
    await asyncio.sleep(10)
    assert ended[1:] == [("first", 5, False)]
    await pool.close()


@simulated
async def test_groups_go_where_their_environment_runs_also_when_a_worker_comes_back_elsewhere() -> None:
    homes = [0]
    other = RolloutWorker(FakeEnvironments(), [FakeEngine()])
    pool = RolloutPool([Unlucky(homes), other], homes=lambda key: [0, 1] if key == "free" else homes)
    lane = pool.open_lane(TRAINING, [4])
    lane.set_up(0, True)
    running = asyncio.create_task(pool.run([task()] * 2, settings()))
    await asyncio.sleep(0.5)
    assert lane.has_free_slot("free") and not lane.has_free_slot("arithmetic"), "its home has both slots in use"
    await asyncio.sleep(1)
    cancelled = pool.start([task()], settings(), lambda *_: None)
    cancelled.cancel()
    assert all(sample.reward for sample in await running) and now() == 2
    assert not cancelled.samples
    await pool.close()


@simulated
async def test_a_sample_that_ends_after_another_worker_failed_the_run_is_left_alone() -> None:
    class Fails(Unlucky):
        async def restart(self) -> None:
            raise InfrastructureError("no more workers")

    engine = FakeEngine(wait=lambda: asyncio.sleep(5))
    pool = RolloutPool([Fails(), RolloutWorker(FakeEnvironments(), [engine])])
    pool.open_lane(TRAINING, [4]).set_up(0, True)
    groups = [asyncio.create_task(pool.run([task()] * 2, settings())) for _ in range(2)]
    assert [type(error) for error in await asyncio.gather(*groups, return_exceptions=True)] == [InfrastructureError] * 2
    await asyncio.sleep(10)
    assert not pool._serving[1].done(), "its worker goes on to be listened to"
    await pool.close()
