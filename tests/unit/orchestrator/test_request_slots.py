"""Request slots: capacity, affinity of a group to a server, order of waiters, servers that go down."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulated_clock import run_simulated

from telescope.errors import DeadlineExceeded
from telescope.rollout.request_slots import (
    GroupSlotPool,
    RequestSlotPool,
    share_slots,
    share_slots_by_weight,
    slots_per_server,
)


def pool(*capacities: int) -> RequestSlotPool:
    slots = RequestSlotPool(list(capacities))
    for index in range(len(capacities)):
        slots.set_up(index, True)
    return slots


async def test_a_server_never_has_more_samples_than_slots() -> None:
    slots = pool(3)
    running = most = 0

    async def sample(group: int) -> None:
        nonlocal running, most
        lease = await slots.acquire(group, timeout=5)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        slots.release(lease)

    await asyncio.gather(*(sample(i) for i in range(20)))
    assert most == 3
    assert slots.num_used == 0


async def test_a_group_stays_on_one_server() -> None:
    slots = pool(8, 8)
    leases = [await slots.acquire(group, timeout=1) for group in (1, 2) for _ in range(4)]
    assert len({lease.server for lease in leases[:4]}) == 1
    assert len({lease.server for lease in leases[4:]}) == 1
    assert leases[0].server != leases[4].server, "the second group goes to the emptier server"


async def test_a_later_turn_is_served_before_a_new_sample() -> None:
    slots = pool(1)
    lease = await slots.acquire(0, timeout=1)
    order: list[str] = []

    async def wait(name: str, group: int, turn: int) -> None:
        lease = await slots.acquire(group, turn=turn, timeout=1)
        order.append(name)
        slots.release(lease)

    waiting = [asyncio.create_task(wait("new sample", 1, 0)), asyncio.create_task(wait("second turn", 0, 1))]
    await asyncio.sleep(0)
    slots.release(lease)
    await asyncio.gather(*waiting)
    assert order == ["second turn", "new sample"]


@pytest.mark.parametrize("kind", [RequestSlotPool, GroupSlotPool])
async def test_a_server_that_is_down_gets_nothing_and_its_groups_move(kind: type[RequestSlotPool]) -> None:
    slots = kind([2, 2])
    for server in (0, 1):
        slots.set_up(server, True)
    first = await slots.acquire(7, timeout=1)
    slots.set_up(first.server, False)
    second = await slots.acquire(7, timeout=1)
    assert second.server != first.server
    for lease in (first, second):
        slots.release(lease)
    slots.forget_group(7)
    assert slots.num_used == slots.servers[first.server].used == 0


async def test_samples_wait_until_a_server_comes_up() -> None:
    slots = RequestSlotPool([1])
    waiting = asyncio.create_task(slots.acquire(0, timeout=5))
    await asyncio.sleep(0)
    assert not waiting.done()
    slots.set_up(0, True)
    assert (await waiting).server == 0


def test_a_first_turn_waits_as_long_as_later_turns_get_slots() -> None:
    async def scenario() -> None:
        slots = pool(1)
        lease = await slots.acquire(0, timeout=30.0)
        waiting = asyncio.create_task(slots.acquire(1, timeout=30.0))
        for turn in range(1, 21):
            later = asyncio.create_task(slots.acquire(0, turn=turn, timeout=30.0))
            await asyncio.sleep(10.0)
            slots.release(lease)
            lease = await later
        assert not waiting.done(), "it has waited for 200 seconds, and no slot was ever free"
        slots.release(lease)
        lease = await waiting
        begun = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="no request slot became free within 30 s; group 2 waits"):
            await slots.acquire(2, timeout=30.0)
        assert asyncio.get_running_loop().time() == begun + 30.0

    run_simulated(scenario())


async def test_a_wait_that_times_out_is_named_and_leaks_nothing() -> None:
    slots = pool(1)
    lease = await slots.acquire(0, timeout=1)
    with pytest.raises(DeadlineExceeded, match=r"group 5 .*server 0: up, 1/1"):
        await slots.acquire(5, timeout=0.01)
    slots.release(lease)
    assert slots.num_used == slots.num_waiting == 0
    with pytest.raises(AssertionError):
        slots.release(lease)


async def test_a_cancelled_waiter_releases_a_slot_it_was_just_assigned() -> None:
    slots = pool(1)
    lease = await slots.acquire(0, timeout=1)
    waiting = asyncio.create_task(slots.acquire(1, timeout=5))
    await asyncio.sleep(0)
    slots.release(lease)  # hands the slot to the waiter, whose task has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slots.num_used == 0


async def test_a_group_bound_to_a_full_server_does_not_block_others() -> None:
    slots = pool(1, 1)
    first = await slots.acquire(1, timeout=1)
    tied = asyncio.create_task(slots.acquire(1, timeout=5))
    await asyncio.sleep(0)
    other = await asyncio.wait_for(slots.acquire(2, timeout=1), 1)
    assert other.server != first.server
    slots.release(first)
    assert (await tied).server == first.server


async def test_a_recovered_server_gets_new_groups_while_moved_groups_wait() -> None:
    slots = pool(2, 2)
    slots.set_up(1, False)
    lease = [await slots.acquire(0, timeout=1) for _ in range(2)]
    moved = asyncio.create_task(slots.acquire(0, timeout=1))
    await asyncio.sleep(0)
    assert not slots.num_free
    slots.set_up(1, True)
    assert slots.num_waiting == 1
    assert slots.num_free, "the waiting sample shares its prompt with those on server 0 and stays there"
    assert (await slots.acquire(1, timeout=1)).server == 1
    slots.release(lease[0])
    assert (await moved).server == 0


def test_slots_count_samples_or_groups_as_configured() -> None:
    config = config_of(max_concurrent_prompts_per_server=3, group_size=4, enable_individual_sample_lanes=True)
    assert slots_per_server(config) == 12
    config = config.replace(enable_individual_sample_lanes=False, free_lane_after_generation=False)
    assert slots_per_server(config) == 3


@given(st.lists(st.integers(0, 64), min_size=1, max_size=6), st.integers(1, 40), st.sampled_from([1, 4, 8]))
def test_workers_share_slots_in_whole_groups(capacities: list[int], num_workers: int, group_size: int) -> None:
    shares = share_slots(capacities, num_workers, group_size)
    assert [sum(of_server) for of_server in zip(*shares, strict=True)] == capacities, "no slot is lost"
    for server, capacity in enumerate(capacities):
        least = min((share[server] for share in shares if share[server]), default=capacity)
        assert least >= min(group_size, capacity), "each pair runs at least one whole group"
    enough_for_two = sum(capacity // (2 * group_size) for capacity in capacities) >= num_workers
    if enough_for_two:
        assert all(any(share) for share in shares), "no worker is idle"
        assert min(slots for share in shares for slots in share if slots) >= min(
            2 * group_size, min(filter(None, capacities))
        )
    if sum(min(num_workers, capacity // (2 * group_size)) for capacity in capacities) >= 2 * num_workers:
        assert all(sum(map(bool, share)) >= 2 for share in shares), "a server that is down idles no worker"


@given(
    st.lists(st.integers(0, 64), min_size=1, max_size=4), st.sampled_from([1, 8]),
    st.lists(st.tuples(st.sampled_from([(0,), (0, 3), tuple(range(5))]), st.floats(0.01, 100.0)), min_size=1),
)  # fmt: skip
def test_environments_have_slots_where_they_run(capacities: list[int], group_size: int, homes: list[Any]) -> None:
    shares = share_slots_by_weight(capacities, homes, 5, group_size)
    beyond = [sum(of_server) - slots for of_server, slots in zip(zip(*shares, strict=True), capacities, strict=True)]
    assert min(beyond) == 0 and sum(beyond) <= 3, "no slot is lost"
    for workers, _ in homes:
        assert not any(capacities) or any(any(shares[worker]) for worker in workers)


def test_workers_have_few_servers_with_many_slots() -> None:
    assert share_slots([64] * 4, 4, 8) == [[32, 0, 32, 0], [32, 0, 32, 0], [0, 32, 0, 32], [0, 32, 0, 32]]


async def test_a_group_slot_is_shared_by_its_samples_and_released_by_the_last() -> None:
    slots = GroupSlotPool([1])
    slots.set_up(0, True)
    first, second = await asyncio.gather(*(slots.acquire(1, timeout=1) for _ in range(2)))
    assert slots.num_used == 1
    waiting = asyncio.create_task(slots.acquire(2, timeout=5))
    slots.release(first)
    slots.release(second)
    await asyncio.sleep(0)
    assert not waiting.done(), "the group keeps its slot until it is finished"
    slots.forget_group(1)
    await waiting
    slots.forget_group(2)
    assert slots.num_used == 0


async def test_a_cancelled_sample_leaves_the_group_waiting_for_its_slot() -> None:
    slots = GroupSlotPool([1])
    slots.set_up(0, True)
    await slots.acquire(1, timeout=1)
    cancelled, other = (asyncio.create_task(slots.acquire(2, timeout=5)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    slots.forget_group(1)
    await other
    slots.forget_group(2)
    assert slots.num_used == 0
