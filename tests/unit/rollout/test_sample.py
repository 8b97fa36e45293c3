"""Running one sample: turns, retries, masks, and the release of slots."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rollout.fakes import Bench, FakeEngine, FakeEnvironments, FakeLanes, generation, reward, task, tick
from tests.unit.rollout.fakes import settings as sample_settings

from telescope.config import TelescopeConfig
from telescope.environments.types import Advance
from telescope.errors import DeadlineExceeded, EnvironmentFailure, InfrastructureError
from telescope.inference.base import Generation, parse_request_id
from telescope.rollout.request_slots import RequestSlotPool
from telescope.rollout.sample import MAX_INFRASTRUCTURE_RETRIES, Rollout, RolloutSettings, request_seed
from telescope.rollout.stops import Stops
from telescope.rollout.trajectory import compression_ratio
from telescope.trainer.packing import lay_out, untrained_sample

DEAD = InfrastructureError("the server is gone")


async def test_a_sample_is_generated_and_scored():
    bench = Bench()
    sample = await bench.run()
    assert sample.reward is not None
    assert (sample.total_reward, sample.failure_kind) == (1.0, None)
    assert sample.completion_text == "text"
    assert sample.compression_ratio == compression_ratio("text")
    assert sample.started_at <= sample.generated_at <= sample.finished_at
    request = bench.engine.requests[0]
    assert (request.request_id, request.prompt_token_ids, request.seed) == (
        "5-0.0.0@0", [1, 2, 3], request_seed(7, 5, 0, 0),
    )  # fmt: skip
    assert (request.temperature, request.top_p, request.priority) == (0.7, None, 0)
    assert bench.environments.calls == [("arithmetic#1", 3, [7, 8], "stop", False)]
    assert bench.slots.num_leased == 0


async def test_a_payload_passes_untouched_from_the_task_to_request_and_micro_batch():
    bench = Bench(payload=object())
    [sample] = (await bench.run()).sequences()
    assert bench.engine.requests[0].payload is bench.payload
    assert lay_out([sample, untrained_sample("other", np.arange(3))]).payloads == [bench.payload, None]


async def test_an_eval_asks_the_environment_for_its_eval_metrics():
    bench = Bench()
    await bench.run(for_eval=True)
    assert bench.environments.calls[0][-1] is True


async def test_a_request_to_a_failed_engine_is_retried_on_another_slot():
    bench = Bench(FakeEngine([DEAD, DEAD, None]), slots=FakeLanes(num_servers=2))
    sample = await bench.run()
    assert sample.total_reward == 1.0
    assert sample.num_infrastructure_retries == 2
    assert sample.failed_requests == [None, None], "the tokens of an engine that exited are unknown"
    assert bench.failures == [(0, "the server is gone"), (1, "the server is gone")]
    assert [lease.slot for lease in bench.slots.leases] == [0, 1, 2]
    assert (sample.server_index, sample.slot) == (0, 2), "the slot that served it, not one that failed"
    ids = [request.request_id for request in bench.engine.requests]
    assert len(set(ids)) == 3, "a request id is never used twice"
    assert len({request.seed for request in bench.engine.requests}) == 1, "the same seed on every server"
    assert bench.slots.num_leased == 0


async def test_a_sample_is_masked_when_its_retries_are_used_up():
    bench = Bench(FakeEngine([DEAD] * 10))
    sample = await bench.run()
    assert len(bench.engine.requests) == 1 + 3
    assert sample.reward is None
    assert (sample.failure_kind, sample.failure_message) == ("infrastructure", "the server is gone")
    assert not bench.environments.calls, "a failed engine is never scored"
    assert bench.slots.num_leased == 0


async def test_an_engine_that_aborts_by_itself_has_failed():
    bench = Bench(FakeEngine([generation([7], finish_reason="abort")]))
    sample = await bench.run()
    assert sample.total_reward == 1.0
    assert sample.num_infrastructure_retries == 1
    assert (sample.failed_requests, sample.totals.num_completion_tokens, sample.num_sampled_tokens) == ([1], 2, 3)
    assert bench.environments.calls == [("arithmetic#1", 3, [7, 8], "stop", False)], "the aborted answer is not scored"


async def test_an_answer_of_a_server_that_restarted_unnoticed_is_not_used():
    """The server has the initial weights again, and its group's age would not show it."""
    bench = Bench(FakeEngine([generation([7], version=0), generation([7, 8], version=3)], loaded_version=3))
    trajectory = await bench.run()
    assert trajectory.num_infrastructure_retries == 1 and trajectory.totals.version_range == (3, 3)
    assert "sampled with policy version 0, but the server had received version 3" in str(bench.failures[0][1])
    assert trajectory.failed_requests == [1], "its tokens are counted"


async def test_a_failed_environment_masks_the_sample_without_a_retry():
    bench = Bench(environments=FakeEnvironments([EnvironmentFailure("KeyError: 'numbers'")]))
    sample = await bench.run()
    assert sample.reward is None
    assert (sample.failure_kind, sample.failure_message) == ("environment", "KeyError: 'numbers'")
    assert sample.stop_reason == "rollout_error"
    assert len(bench.engine.requests) == len(bench.environments.calls) == 1
    assert sample.totals.num_completion_tokens == 2, "generated turns stay recorded"
    assert not bench.failures
    assert bench.slots.num_leased == 0


async def test_the_turns_of_a_rollout_are_one_growing_sequence():
    bench = Bench(
        FakeEngine([generation([7, 8]), generation([9]), generation([10])]),
        FakeEnvironments(
            [Advance([20, 21]), Advance([22]),
             Advance([], reward(0.5), end_reason="won")]
        ),
    )  # fmt: skip
    sample = await bench.run(turns=True)
    assert [request.prompt_token_ids for request in bench.engine.requests] == [
        [1, 2, 3], [1, 2, 3, 7, 8, 20, 21], [1, 2, 3, 7, 8, 20, 21, 9, 22],
    ]  # fmt: skip
    assert [request.seed for request in bench.engine.requests] == [request_seed(7, 5, 0, turn) for turn in range(3)]
    ids = [parse_request_id(request.request_id) for request in bench.engine.requests]
    assert [(known.sample_id, known.turn, known.attempt) for known in ids if known] == [
        ("5-0", turn, 0) for turn in range(3)
    ]
    assert bench.slots.turns == [0, 1, 2], "each turn acquires its own slot, later turns first"
    assert sample.completion_text == "text\ntext\ntext"
    assert (sample.total_reward, sample.stop_reason) == (0.5, "won")
    (train,) = sample.sequences()
    assert train.token_ids_L.tolist() == [1, 2, 3, 7, 8, 20, 21, 9, 22, 10]
    assert train.trained_L.tolist() == [token in (7, 8, 9, 10) for token in train.token_ids_L]
    assert sample.totals.num_environment_tokens == 3
    assert not bench.environments.open


async def test_a_turn_asks_for_the_routes_that_are_not_known_and_its_answer_has_them_all():
    def routed(tokens: list[int], *experts: int) -> Generation:
        answer = generation(tokens)
        answer.routes_MXK = np.array(experts, np.uint8)[:, None, None] + np.arange(2, dtype=np.uint8)
        return answer

    bench = Bench(
        FakeEngine(
            [
                routed([7, 8], 1, 2, 3, 4),  # of 1, 2, 3 and 7
                routed([9], 5, 6),  # of too few tokens
                routed([9], 5, 6, 7),  # of 8, 20 and 21
                generation([10]),  # without any
                routed([11], 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),  # of all tokens again
            ]
        ),
        FakeEnvironments([Advance([20, 21]), Advance([22]),
                          Advance([23]), Advance([], reward(1.0))]),
    )  # fmt: skip
    sample = await bench.run(turns=True)
    assert [request.routes_start for request in bench.engine.requests] == [0, 4, 4, 7, 0]
    assert "routed experts of 2 tokens instead of 3" in str(bench.failures[0][1])
    (train,) = sample.sequences()
    assert train.token_ids_L.tolist() == [1, 2, 3, 7, 8, 20, 21, 9, 22, 10, 23, 11]
    assert train.routes_LXK[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]


async def test_a_turn_whose_prompt_is_rendered_anew_begins_another_training_sample():
    bench = Bench(
        FakeEngine([generation([7, 8]), generation([9]), generation([10])]),
        FakeEnvironments([
            Advance([1, 2, 3, 70, 20], restarts=True, divergence="history"),
            Advance([22]),
        ]),
    )  # fmt: skip
    sample = await bench.run(turns=True)
    assert [request.prompt_token_ids for request in bench.engine.requests] == [
        [1, 2, 3], [1, 2, 3, 70, 20], [1, 2, 3, 70, 20, 9, 22],
    ]  # fmt: skip
    first, second = sample.sequences()
    assert (first.token_ids_L.tolist(), second.token_ids_L.tolist()) == ([1, 2, 3, 7, 8], [1, 2, 3, 70, 20, 9, 22, 10])
    assert second.trained_L.tolist() == [False] * 5 + [True, False, True]
    assert len({first.sample_id, second.sample_id}) == 2
    assert sample.totals.divergences == {"history": 1}
    assert sample.totals.num_environment_tokens == 1, "tokens rendered again are not new"


async def test_an_engine_that_fails_in_a_later_turn_repeats_that_turn_alone():
    bench = Bench(FakeEngine([generation([7]), DEAD, generation([9])]), FakeEnvironments([Advance([20])]))
    sample = await bench.run(turns=True)
    requests = [(len(request.prompt_token_ids), request.priority) for request in bench.engine.requests]
    assert requests == [(3, 0), (5, 1), (5, 1)], "priorities follow turns"
    assert len(sample.turns) == 2
    assert (len(bench.environments.calls), len(bench.environments.begun)) == (2, 1)


async def test_a_conversation_whose_state_is_lost_begins_again():
    bench = Bench(
        FakeEngine([generation([7]), generation([8]), generation([9]), generation([10])]),
        FakeEnvironments([Advance([20]), InfrastructureError("the process ended"), Advance([21])]),
    )
    sample = await bench.run(turns=True)
    assert len(bench.environments.begun) == 2
    assert sample.total_reward == 1.0
    sampled = [turn.generation.token_ids_N.tolist() for turn in sample.turns]
    assert sampled == [[9], [10]], "nothing of the lost conversation stays"
    assert (sample.lost_conversations, sample.totals.num_completion_tokens, sample.num_sampled_tokens) == ([2], 2, 4)
    ids = [request.request_id for request in bench.engine.requests]
    assert len(set(ids)) == len(ids), "a request id is never used twice"
    assert not bench.environments.open


async def test_a_conversation_that_is_lost_again_and_again_masks_the_sample_as_infrastructure():
    bench = Bench(environments=FakeEnvironments([InfrastructureError("the process ended")] * 10))
    sample = await bench.run(turns=True)
    assert (sample.failure_kind, sample.failure_message) == ("infrastructure", "the process ended")
    assert sample.reward is None
    assert len(bench.environments.begun) == 1 + 3


@pytest.mark.parametrize(("num_failures", "reward", "kind"), [(1, 1.0, None), (10, None, "infrastructure")])
async def test_a_sandbox_failure_is_retried_with_the_same_answer_and_masks_the_sample_if_it_lasts(
    num_failures, reward, kind
):
    bench = Bench(environments=FakeEnvironments([InfrastructureError("the sandbox is gone")] * num_failures))
    sample = await bench.run()
    assert (sample.reward and sample.total_reward, sample.failure_kind) == (reward, kind)
    assert len(bench.engine.requests) == 1
    assert num_failures > 1 or len(bench.environments.calls) == 2


@pytest.mark.parametrize(("environments", "words"), [
    (FakeEnvironments(on_begin=EnvironmentFailure("KeyError: 'word'")), "KeyError: 'word'"),
    (FakeEnvironments(first_prompt=[1, 2, 4]), "get_initial_prompt"),
])  # fmt: skip
async def test_an_environment_that_cannot_begin_or_varies_its_first_prompt_masks_the_sample(environments, words):
    bench = Bench(environments=environments)
    sample = await bench.run(turns=True)
    assert sample.failure_kind == "environment"
    assert words in str(sample.failure_message)
    assert not bench.engine.requests
    assert not bench.environments.open


@pytest.mark.parametrize(("wait", "sampled"), [("engine", [[7], [9]]), ("environment", [[7], [9]]), ("slot", [[7]])])
async def test_a_cancelled_sample_ends_during_any_wait_and_keeps_its_tokens(wait, sampled):
    reason = "abort" if wait == "engine" else "stop"
    bench = Bench(
        FakeEngine([generation([7]), generation([9], finish_reason=reason)]),
        FakeEnvironments([Advance([20])], turns=True),
    )
    over = asyncio.Event()

    async def hold_the_second_turn() -> None:
        if len(bench.engine.requests) == (1 if wait == "slot" else 2):
            await over.wait()

    if wait == "environment":
        bench.environments.on_call = hold_the_second_turn
    elif wait == "engine":
        bench.engine.wait = hold_the_second_turn
    else:
        bench.slots.wait = hold_the_second_turn
    rollout = Rollout(
        task(), slot_key=5, slots=bench.slots, engine_of=lambda server: bench.engine,
        environments=bench.environments,
        settings=sample_settings(), on_engine_failure=bench.on_engine_failure,
    )  # fmt: skip
    running = asyncio.create_task(rollout.run())
    await tick(20)
    assert rollout.cancel() == ([(0, "5-0.1.0@1")] if wait == "engine" else []), "the request to abort in the engine"
    if wait == "engine":
        over.set()
    sample = await running
    assert sample.cancelled
    assert (sample.reward, sample.failure_kind) == (None, None)
    assert [turn.generation.token_ids_N.tolist() for turn in sample.turns] == sampled
    assert not bench.environments.open, "the environment's state is dropped"
    assert bench.slots.num_leased == 0


async def test_an_answer_may_use_the_context_that_the_prompt_leaves():
    bench = Bench()
    await bench.run(prompt=list(range(60)), max_context=64, max_tokens=16)
    assert bench.engine.requests[0].max_tokens == 4


async def test_a_prompt_that_fills_the_context_masks_the_sample():
    bench = Bench()
    sample = await bench.run(prompt=list(range(15)), max_context=15)
    assert (sample.reward, sample.failure_kind) == (None, "environment")
    assert "turn 0 fills the context (max_model_len, seq_len)" in str(sample.failure_message)
    assert sample.stop_reason == "prompt_too_long"
    assert not bench.engine.requests
    assert bench.slots.num_leased == 0


@pytest.mark.parametrize("free", [True, False])
async def test_a_slot_is_free_while_the_environment_runs_if_so_configured(free):
    bench = Bench()
    leased: list[int] = []

    async def look() -> None:
        leased.append(bench.slots.num_leased)

    bench.environments.on_call = look
    await bench.run(free_lane_after_generation=free)
    assert leased == [0 if free else 1]
    assert bench.slots.num_leased == 0


@pytest.mark.parametrize("for_eval", [False, True])
async def test_a_slot_of_a_server_that_was_closed_meanwhile_is_not_used(for_eval):
    """Before the first turn of an eval's sample, or while the environment replies, the sample holds a slot."""
    slots = RequestSlotPool([1, 1])
    slots.set_up(0, True)
    slots.set_up(1, True)

    class Closing(FakeEnvironments):
        async def begin(self, rollout: str, key: str, index: int) -> list[int]:
            if for_eval:
                slots.set_up(0, False)
            return await super().begin(rollout, key, index)

        async def respond(self, *arguments: Any, **options: Any) -> Advance:
            slots.set_up(0, False)
            return await super().respond(*arguments, **options)

    bench = Bench(environments=Closing([Advance([20])]), slots=cast(Any, slots))
    sample = await bench.run(turns=True, for_eval=for_eval, free_lane_after_generation=False)
    assert [turn.server for turn in sample.turns] == [int(for_eval), 1]
    assert sample.num_infrastructure_retries == slots.num_used == 0


async def test_a_failed_server_is_reported_before_its_slot_is_free_for_others():
    bench = Bench(FakeEngine([DEAD]))
    leased: list[int] = []
    bench.on_engine_failure = lambda server, error: leased.append(bench.slots.num_leased)  # type: ignore[method-assign]
    await bench.run()
    assert leased == [1]


async def test_a_timeout_of_the_wait_for_a_slot_is_no_sample_failure():
    bench = Bench()

    async def never() -> None:
        raise DeadlineExceeded("no inference slot came free")

    bench.slots.wait = never
    with pytest.raises(DeadlineExceeded):
        await bench.run()


async def test_a_bug_in_an_engine_is_raised_and_releases_the_slot():
    bench = Bench(FakeEngine([ArithmeticError("a bug")]))
    with pytest.raises(ArithmeticError):
        await bench.run()
    assert bench.slots.num_leased == 0


steps = st.sampled_from(["ok", "dead", "abort", "environment fails", "turn", "bug"])


@settings(max_examples=50)
@given(
    script=st.lists(steps, max_size=8),
    free=st.booleans(),
    turns=st.booleans(),
    cancel_after=st.integers(0, 30),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_a_slot_is_released_exactly_once_after_any_failure_or_cancellation(script, free, turns, cancel_after, delays):
    answers: dict[str, Any] = {
        "dead": DEAD, "abort": generation([7], finish_reason="abort"), "bug": ArithmeticError("a bug")
    }  # fmt: skip
    advances: dict[str, Any] = {
        "environment fails": EnvironmentFailure("broken"), "turn": Advance([20])
    }  # fmt: skip
    pauses = iter(delays * 50)

    async def pause() -> None:
        await tick(next(pauses))

    async def scenario() -> Bench:
        bench = Bench(
            FakeEngine([answers.get(step) for step in script], wait=pause),
            FakeEnvironments([advances.get(step) for step in script if step not in answers], on_call=pause),
        )
        bench.slots.wait = pause
        running = asyncio.create_task(bench.run(turns=turns, free_lane_after_generation=free, max_context=1000))
        await tick(cancel_after)
        running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(outcome, Exception):
            assert isinstance(outcome, ArithmeticError)
        return bench

    bench = asyncio.run(scenario())
    assert all(bench.slots.releases[lease.slot] == 1 for lease in bench.slots.leases)
    assert not bench.environments.open, "the environment keeps no state"


@settings(max_examples=50)
@given(
    outcomes=st.lists(steps, max_size=12),
    cancelled=st.sets(st.integers(0, 5)),
    free=st.booleans(),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_many_rollouts_over_real_slots_leave_every_slot_free(outcomes, cancelled, free, delays):
    pauses = iter(delays * 500)

    async def pause() -> None:
        await tick(next(pauses))

    async def scenario() -> RequestSlotPool:
        slots = RequestSlotPool([2])
        slots.set_up(0, True)
        engine = FakeEngine([DEAD if outcome == "dead" else None for outcome in outcomes], wait=pause)
        running = []
        for _ in range(6):
            bench = Bench(engine, FakeEnvironments(on_call=pause), slots)  # type: ignore[arg-type]
            running.append(asyncio.create_task(bench.run(free_lane_after_generation=free)))
        await tick(3)
        for index in cancelled:
            running[index].cancel()
            await pause()
        await asyncio.gather(*running, return_exceptions=True)
        return slots

    slots = asyncio.run(scenario())
    assert slots.num_used == slots.num_waiting == 0
    assert sorted(slots.servers[0].free_slots) == [0, 1]


def test_settings_of_a_run_come_from_its_config():
    config = TelescopeConfig.model_validate(
        {
            "model": "m", "environments": [{"name": "countdown"}], "temperature": 0.7, "max_tokens": 12,
            "max_model_len": 99, "vllm_scheduling_policy": "priority", "free_lane_after_generation": False,
        }
    )  # fmt: skip
    built = RolloutSettings.from_config(config, Stops([7], ["end"]))
    assert (built.sampling.stops.token_ids, built.sampling.stops.texts) == ([7], ["end"])
    assert (built.sampling.temperature, built.sampling.max_tokens, built.sampling.max_context) == (0.7, 12, 99)
    assert not built.free_lane_after_generation
    assert not built.for_eval
    assert built.max_infrastructure_retries == MAX_INFRASTRUCTURE_RETRIES
    assert built.slot_timeout > config.request_timeout_seconds, "a slot may be in use for a whole generation"
