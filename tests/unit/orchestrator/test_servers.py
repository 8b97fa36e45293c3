"""The server pool: servers close on failure, return with their weights, or are abandoned."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulation import FakeServer

from telescope.errors import InfrastructureError, RankLost
from telescope.evals.entries import environment_keys
from telescope.orchestrator import servers as servers_module
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.servers import MAX_FAILED_BRING_UPS, ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import RolloutPool
from telescope.rollout.sample import RolloutSettings

DEAD = InfrastructureError("connection refused")


class Bench:
    """A pool of servers that are up. `brought` is each transfer of weights as (server, fresh, slots open before)."""

    def __init__(
        self, num_servers: int = 2, *, start_timeout: float = 5.0, hang_timeout: float = 0.0, workers: Any = ()
    ) -> None:
        self.handles = [FakeServer() for _ in range(num_servers)]
        self.slots = RolloutPool(workers).open_lane(TRAINING, [1] * num_servers)
        self.status = RunStatus("test", 10)
        self.brought: list[tuple[int, bool, bool]] = []
        self.weights_fail = False
        self.lost_ranks = 0
        clients: Any = self.handles
        self.pool = ServerPool(
            self.handles, clients, self.slots, self.status,
            start_timeout=start_timeout, hang_timeout=hang_timeout,
        )  # fmt: skip
        self.pool.bring_weights = self.bring_weights
        for index in range(num_servers):
            self.pool.open(index)

    async def bring_weights(self, server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        self.brought.append((server, fresh, self.slots.up[server]))
        await asyncio.sleep(0)
        if self.lost_ranks:
            self.lost_ranks -= 1
            raise RankLost("trainer rank 0 was killed")
        if self.weights_fail:
            raise InfrastructureError(f"server {server} did not take the weights")
        on_loaded()

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not predicate():  # noqa: ASYNC110  # the pool notifies only the slots
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[asyncio.Task[None]]:
        watching = asyncio.create_task(self.pool.watch())
        yield watching
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "POLL_SECONDS", 0.004)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_close_a_server_at_once_and_only_that_one_with_one_message(bench) -> None:
    for _ in range(50):
        bench.pool.close(0, DEAD)
        assert (bench.pool.up, bench.slots.up) == ([1], [False, True])
    assert "connection refused" in bench.status.components["server 0"]
    assert len(bench.status.messages) == 1


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_restart_is_detected_by_its_count_also_between_two_polls(bench, restarts) -> None:
    bench.handles[0].restarts = restarts
    async with bench.watched():
        if not restarts:
            bench.pool.close(0, DEAD)
        await bench.until(lambda: len(bench.brought) == 1 and bench.pool.up == [0, 1])
    assert bench.brought == [(0, bool(restarts), False)]
    assert bench.slots.up[0]


async def test_a_restarted_server_has_its_weights_before_its_slots_open(bench) -> None:
    async with bench.watched():
        bench.handles[1].state, bench.handles[1].error = "restarting", "was killed by SIGKILL"
        await bench.until(lambda: bench.pool.up == [0])
        assert bench.brought == []
        bench.handles[1].restarts += 1
        bench.handles[1].state = "ready"
        await bench.until(lambda: bench.pool.up == [0, 1] and len(bench.status.messages) == 2)
    assert bench.brought == [(1, True, False)]
    assert [message.partition(" (")[0] for message in bench.status.messages] == [
        "server 1 is down: its process is restarting", "server 1 is back with the current weights",
    ]  # fmt: skip
    assert all("was killed by SIGKILL" in message for message in bench.status.messages)


async def test_a_ready_server_that_does_not_answer_gets_no_weights_yet() -> None:
    bench = Bench(1)
    bench.handles[0].fails = True
    async with bench.watched():
        bench.pool.close(0, DEAD)
        await asyncio.sleep(0.02)
        assert bench.brought == []
        bench.handles[0].fails = False
        await bench.until(lambda: bench.pool.up == [0])


async def test_a_server_that_fails_while_it_receives_weights_is_retried(bench) -> None:
    bench.weights_fail = True
    async with bench.watched():
        bench.pool.close(0, DEAD)
        await bench.until(lambda: len(bench.brought) >= 2)
        assert bench.pool.up == [1]
        bench.weights_fail = False
        await bench.until(lambda: bench.pool.up == [0, 1])


@pytest.mark.parametrize("failure", ["weights_fail", "lost_ranks"])
async def test_a_restarted_server_lacks_weights_until_a_transfer_succeeds(bench, failure) -> None:
    setattr(bench, failure, 1)
    async with bench.watched():
        bench.handles[0].restarts = 1
        await bench.until(lambda: len(bench.brought) >= 2)
        bench.weights_fail = False
        await bench.until(lambda: bench.pool.up == [0, 1])
        await asyncio.sleep(0.02)
    assert {fresh for _, fresh, _ in bench.brought} == {True}
    assert bench.pool.up == [0, 1], "it is not taken for a server that restarted again"


async def test_a_server_that_fails_an_update_gets_the_weights_when_it_is_back(bench) -> None:
    bring, failing = bench.bring_weights, {0}

    async def bring_weights(server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        if server in failing:
            raise DEAD
        bench.handles[server].loaded_version = 3
        await bring(server, on_loaded, fresh=fresh)

    bench.pool.bring_weights = bring_weights
    await bench.pool.update([0, 1], 3)
    assert (bench.pool.up, bench.handles[1].loaded_version) == ([1], 3)
    failing.clear()
    async with bench.watched():
        await bench.until(lambda: bench.pool.up == [0, 1])
    await bench.pool.update([0, 1], 3)
    assert bench.brought == [(1, False, True), (0, False, False)], "each server gets them once"


async def test_a_server_that_never_loads_weights_is_abandoned_and_the_others_continue(bench) -> None:
    bench.weights_fail = True
    async with bench.watched() as watching:
        bench.pool.close(0, DEAD)
        await bench.until(lambda: bench.status.components["server 0"] == "failed permanently")
        await asyncio.sleep(0.02)
        assert not watching.done()
    assert bench.pool.up == [1]
    assert len(bench.brought) == MAX_FAILED_BRING_UPS


async def test_a_server_that_receives_weights_when_a_trainer_rank_is_lost_waits_for_the_ranks(bench) -> None:
    bench.lost_ranks = MAX_FAILED_BRING_UPS + 1
    async with bench.watched():
        bench.pool.close(0, DEAD)
        await bench.until(lambda: bench.pool.up == [0, 1])


async def test_a_server_without_an_actor_is_abandoned_and_the_others_continue(bench) -> None:
    bench.handles[0].gone = True
    async with bench.watched() as watching:
        await bench.until(lambda: bench.pool.up == [1])
        await asyncio.sleep(0.01)
        assert not watching.done()
    assert bench.status.components["server 0"] == "failed permanently"


async def test_the_rollout_workers_of_an_abandoned_server_use_the_others() -> None:
    bench = Bench(workers=[None, None])
    shares = [worker.shares for worker in bench.slots.pool.workers]
    assert shares == [{TRAINING: [1, 0]}, {TRAINING: [0, 1]}]
    bench.handles[0].gone = True
    async with bench.watched():
        await bench.until(lambda: bench.pool.up == [1])
    assert shares == [{TRAINING: [0, 1]}, {TRAINING: [0, 1]}], "a worker with a waiting sample has at least one slot"


async def test_slots_are_of_the_workers_that_run_the_environment_and_the_servers_that_serve_it() -> None:
    config = config_of(inference_num_workers=3, eval_num_servers=1, evals=[{"name": "arithmetic"}])
    servers: Any = [FakeServer() for _ in range(3)]
    rollouts = RolloutPool([None, None], homes=lambda key: [1])  # type: ignore[list-item]
    settings = RolloutSettings.from_config(config)
    components = RunComponents(config, environment_keys(config), rollouts, settings, [], {})
    components.open_servers(servers, servers, RunStatus("test", 10))
    lease = await components.servers.lease([2], 0, [("arithmetic", 12)])
    assert [worker.shares for worker in rollouts.workers] == [
        {TRAINING: [0, 0, 0], lease.slots.name: [0, 0, 0]}, {TRAINING: [8, 8, 0], lease.slots.name: [0, 0, 8]}
    ]  # fmt: skip


async def test_a_restart_that_takes_too_long_is_abandoned_with_the_field_to_raise() -> None:
    bench = Bench(1, start_timeout=0.02)
    bench.handles[0].state = "starting"
    with pytest.raises(InfrastructureError, match=r"_start_timeout_seconds = 0\.02 s .*; last state: starting"):
        await asyncio.wait_for(bench.pool.watch(), 5)


async def test_the_wait_for_a_hanging_engine_includes_the_detection_of_the_hang() -> None:
    bench = Bench(start_timeout=0.02, hang_timeout=5.0)
    bench.handles[0].fails = True
    async with bench.watched():
        bench.pool.close(0, InfrastructureError("POST /pause had no answer within 60 s"))
        await asyncio.sleep(0.1)  # longer than a restart may take
        assert bench.brought == []
        bench.handles[0].restarts, bench.handles[0].fails = 1, False
        await bench.until(lambda: bench.pool.up == [0, 1])
    assert bench.brought == [(0, True, False)]


async def test_the_run_ends_with_every_reason_when_no_server_is_left(bench) -> None:
    for index, reason in enumerate(("out of memory", "killed by SIGKILL")):
        bench.handles[index].state, bench.handles[index].error = "failed", reason
    with pytest.raises(InfrastructureError, match=r"no inference server is left.*out of memory.*killed by SIGKILL"):
        await asyncio.wait_for(bench.pool.watch(), 5)
    assert bench.pool.up == []


async def test_a_bug_while_a_server_is_brought_up_ends_the_run(bench) -> None:

    async def broken(server: int, on_loaded: Callable[[], None], *, fresh: bool) -> None:
        raise ArithmeticError("a bug")

    bench.pool.bring_weights = broken
    bench.pool.close(0, DEAD)
    with pytest.raises(ArithmeticError, match="a bug"):
        await asyncio.wait_for(bench.pool.watch(), 5)


async def test_no_server_is_brought_up_when_the_watch_has_ended(bench) -> None:
    bench.handles[0].state = "restarting"
    async with bench.watched():
        await bench.until(lambda: "restarting (restarting)" in bench.status.components["server 0"])
    assert [task.get_name() for task in asyncio.all_tasks() if "bring up" in task.get_name()] == []
