"""The loops over in-memory objects: record rows, opened groups, and wake-ups."""

import asyncio
import contextlib
import gc
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.orchestrator.fakes import config_of, group
from tests.unit.orchestrator.simulation import InMemoryRun
from tests.unit.rollout.fakes import tick

from telescope.config import TelescopeConfig
from telescope.errors import EnvironmentFailure, RunError
from telescope.orchestrator import orchestrator
from telescope.orchestrator.groups import Batch, Group, form_batch
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.supervision import Supervisor
from telescope.orchestrator.training import make_orchestrator
from telescope.rollout.sample import RolloutSettings
from telescope.trainer.batch import StepInput, StepResult, TrainSample
from telescope.utils.process import rare_full_collections


async def test_every_row_of_a_run_fits_its_table_and_every_step_has_its_groups():
    run = InMemoryRun(config_of(number_of_steps=3))
    await run.run()
    steps = run.recorder.of("steps")
    assert [(row["step"], row["version"]) for row in steps] == [(0, 1), (1, 2), (2, 3)]
    for row in steps:
        assert (row["num_groups"], row["num_samples"]) == (2, 4)
        kept = run.recorder.of("groups", status="kept", step=row["step"])
        assert len(kept) == 2
        samples = run.recorder.of("samples", status="kept", step=row["step"])
        assert sorted(sample["sample_id"] for sample in samples) == run.trainer.steps[row["step"]]
        assert row["reward_trained"] == pytest.approx(sum(s["reward"] for s in samples) / 4)
        assert row["reward_mean"] == row["metrics"]["reward/all_groups/mean"]
        assert all(sample["age"] == row["step"] - sample["start_version"] for sample in samples)
        assert sum(sample["advantage"] for sample in samples) == pytest.approx(0, abs=1e-6)


async def test_tokens_of_each_step_add_up_to_all_that_was_generated():
    run = InMemoryRun(config_of(number_of_steps=4, max_async_rollout=2))
    await run.run()
    assert sum(row["num_tokens_generated"] for row in run.recorder.of("steps")) == run.status.num_tokens_generated
    assert run.status.num_tokens_generated == 3 * len(run.engine.requests)
    for row in run.recorder.of("steps"):
        metrics, seconds = row["metrics"], row["metrics"]["timing_step_total"]
        assert metrics["performance/trained_tokens_per_second"] * seconds == pytest.approx(row["num_tokens_trained"])
        assert metrics["performance/generated_tokens_per_second"] * seconds == pytest.approx(
            row["num_tokens_generated"]
        )
        assert metrics["performance/samples_per_second"] * seconds == pytest.approx(row["num_samples"])


async def test_a_group_that_is_discarded_while_a_step_is_written_counts_in_the_next_step():
    run = InMemoryRun(config_of(number_of_steps=2))
    write, discarded = run.recorder.write, group([0.0, 0.0], n=1000)
    late: list[Callable[..., None]] = []

    def writing(table: str, row: Any) -> None:
        write(table, row)
        if table == "groups" and row["status"] == "kept" and not late:
            late.append(run.orchestrator._step_recorder.discarded)
            asyncio.get_running_loop().call_soon(late[0], discarded, "zero_advantage", "all_zero", 1)

    run.recorder.write = writing
    await run.run()
    assert 1000 in {row["group_id"] for row in run.recorder.of("groups", status="discarded", step=1)}
    for row in run.recorder.of("steps"):
        stats = run.recorder.of("step_stats", step=row["step"], environment="", metric="discarded/reward")
        assert sum(one["n"] for one in stats) == row["metrics"]["discarded/all/samples"]


async def test_the_duration_of_a_step_does_not_depend_on_the_clock(monkeypatch):
    ahead = itertools.count(1e9, -3600)  # set back by an hour between any two readings
    monkeypatch.setattr(orchestrator.time, "time", lambda: next(ahead))
    run = InMemoryRun(config_of(number_of_steps=2))
    await run.run()
    for metrics in run.recorder.step_metrics:
        assert 0 <= metrics["timing_waiting_for_data"] < metrics["timing_step_total"] < 20
        assert metrics["timing_step_active"] >= 0


async def test_full_collections_are_rare_while_a_run_trains(monkeypatch):
    monkeypatch.setattr(orchestrator, "rare_full_collections", rare_full_collections)
    run = InMemoryRun(config_of(number_of_steps=1))
    frozen: list[int] = []
    train_step = run.trainer.train_step

    async def watched(inputs: list[StepInput]) -> StepResult:
        frozen.append(gc.get_freeze_count())
        return await train_step(inputs)

    monkeypatch.setattr(run.trainer, "train_step", watched)
    await run.run()
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0


async def test_nothing_is_generated_beyond_the_last_step():
    run = InMemoryRun(config_of(number_of_steps=4, max_async_rollout=3))
    await run.run()
    ledger = run.orchestrator.ledger
    assert ledger.num_trained == 4 * 2
    assert ledger.open == set()
    assert ledger.num_opened == ledger.num_trained + sum(ledger.dropped.values())
    assert len(run.recorder.of("groups")) == ledger.num_opened, "every group is recorded"


@pytest.mark.parametrize("resumed_after", [1, 2, 3])
@pytest.mark.parametrize("max_async_rollout", [0, 2])
async def test_a_run_resumed_after_any_step_trains_every_prompt_exactly_once(resumed_after, max_async_rollout):
    states: dict[int, dict[str, Any]] = {}
    settled: dict[int, set[int]] = {}

    async def after_step(step: int, state: Callable[[], RunState]) -> None:
        await tick(step)  # a batch may be packed meanwhile
        states[step] = json.loads(json.dumps(state().state_dict()))
        settled[step] = {row["group_id"] for row in first.recorder.of("groups") if row["step"] < step}

    config = config_of(number_of_steps=6, max_async_rollout=max_async_rollout, prompt_prefetch_buffer_size=5)
    first = InMemoryRun(config, after_step=after_step)
    await first.run()
    state = RunState.load_state_dict(states[resumed_after])
    assert state.step == resumed_after
    left = {group.group_id for group in state.groups} | set(state.sampler.unfinished)
    assert left | settled[resumed_after] == set(range(state.sampler.next_draw)), "no prompt is skipped"
    assert not left & settled[resumed_after], "none is used twice"

    second = InMemoryRun(config, start=state)
    await second.run()
    trained = [row["group_id"] for row in second.recorder.of("groups", status="kept")]
    assert len(set(trained)) == len(trained) == (6 - resumed_after) * 2
    assert not set(trained) & settled[resumed_after]
    recorded = {row["group_id"] for row in second.recorder.of("groups")}
    assert recorded | set(second.orchestrator.position().unfinished) >= left, "none is forgotten"
    assert second.orchestrator.ledger.is_balanced()
    assert second.orchestrator.ledger.num_trained == 6 * 2, "the counts go on"
    assert [row["step"] for row in second.recorder.of("steps")] == list(range(resumed_after, 6))


async def test_a_resumed_run_records_the_prompts_of_groups_that_it_continues_with():
    config = config_of(number_of_steps=6, max_async_rollout=3)

    async def after_step(step: int, state: Callable[[], RunState]) -> None:
        await tick(20)  # until groups are finished
        if step == 2:
            first.orchestrator.request_stop()

    first = InMemoryRun(config, after_step=after_step)
    await first.run()
    state = RunState.load_state_dict(json.loads(json.dumps(first.orchestrator.run_state().state_dict())))
    assert state.step == 2 and state.groups
    second = InMemoryRun(config, start=state)
    await second.run()
    named = {row["prompt_key"] for row in second.recorder.of("samples")}
    assert named == {row["prompt_key"] for row in second.recorder.of("prompts")}


async def test_every_step_records_the_sampler_position():
    run = InMemoryRun(config_of(number_of_steps=4, max_async_rollout=2))
    await run.run()
    for row in run.recorder.of("steps"):
        settled = {
            group["group_id"]
            for group in run.recorder.of("groups")
            if group["step"] <= row["step"] and group["status"] == "kept"
        }
        assert settled <= set(range(row["next_draw"])), "trained prompts come from the sampler"
        assert not settled & set(row["unfinished_draws"]), "and are never used again"
    position = run.orchestrator.position()
    assert (row["next_draw"], row["unfinished_draws"]) == (position.next_draw, list(position.unfinished))


async def test_a_step_is_counted_when_its_weights_are_in_the_engines_and_not_before():
    run = InMemoryRun(config_of(number_of_steps=3, max_async_rollout=0))
    sync, counted = run.trainer.sync, []

    async def slow_sync() -> dict[str, float]:
        counted.append((run.orchestrator.version, len(run.engine.requests)))
        await tick(50)  # groups that the window allows are opened meanwhile
        counted.append((run.orchestrator.version, len(run.engine.requests)))
        return await sync()

    run.trainer.sync = slow_sync  # type: ignore[method-assign]
    await run.run()
    before, after = counted[::2], counted[1::2]
    assert [version for version, _ in after] == [0, 1, 2]
    assert before == after, "a synchronous run opens no group during a sync"


async def test_a_batch_takes_the_oldest_finished_groups(monkeypatch):
    run = InMemoryRun(config_of(number_of_steps=6, max_async_rollout=3))
    compared = []

    def age_of(group: Group) -> tuple[int, int]:
        return group.start_version, group.group_id

    def compare_and_pack(config: TelescopeConfig, groups: list[Group], step: int, **layout: Any) -> Batch:
        remaining = [age_of(group) for group in run.orchestrator._finished]
        compared.append((max(map(age_of, groups)), min(remaining, default=(10**9, 0))))
        return form_batch(config, groups, step, **layout)

    monkeypatch.setattr("telescope.orchestrator.orchestrator.form_batch", compare_and_pack)
    await run.run()
    assert any(remaining[0] < 10**9 for _, remaining in compared), "some batch left finished groups behind"
    assert all(newest_taken < remaining for newest_taken, remaining in compared)


async def test_held_out_items_are_not_trained_on():
    made = InMemoryRun(config_of(number_of_steps=8))
    made.rollouts.infos = {"arithmetic": await made.environment.describe("arithmetic")}
    components = SimpleNamespace(
        config=made.config, keys=SimpleNamespace(training=["arithmetic"], evals=[]), rollouts=made.rollouts,
        servers=SimpleNamespace(slots=made.slots), trainer=made.trainer,
        weights=made.trainer, settings=RolloutSettings.from_config(made.config), data={"arithmetic": {"held_out": 8}},
    )  # fmt: skip
    evaluation = SimpleNamespace(held_out_uids=frozenset(f"uid {n}" for n in range(8, 32)), results=[])
    directory = SimpleNamespace(recorder=made.recorder)
    made.orchestrator = await make_orchestrator(
        cast(Any, components), cast(Any, evaluation), cast(Any, directory), made.status
    )
    await made.run()
    items = {request.prompt_token_ids[0] - 1 for request in made.engine.requests}
    assert len(items) > 8
    assert items <= set(range(32, 64))


async def test_discarded_groups_are_on_record_with_their_reason_and_step():
    run = InMemoryRun(config_of(number_of_steps=6))
    await run.run()
    discarded = run.recorder.of("groups", status="discarded")
    assert discarded
    assert all(row["reason"] == "zero_advantage" and 0 <= row["step"] <= 6 for row in discarded)
    samples = run.recorder.of("samples", status="discarded")
    assert len(samples) == 2 * len(discarded)
    assert all(sample["advantage"] is None for sample in samples)
    counted = sum(metrics["discarded/zero_advantage/groups"] for metrics in run.recorder.step_metrics)
    assert counted == len(discarded) == run.status.num_discarded_groups


async def test_masked_samples_are_counted_and_recorded_with_what_failed():
    run = InMemoryRun(config_of(group_size=4, environment_error_budget=1.0))
    advance = run.environment.advance

    async def sometimes(key: str, index: int, *arguments: object, **options: object) -> object:
        if index % 4 == 0:
            raise EnvironmentFailure("KeyError: 'numbers'")
        return await advance(key, index, *arguments, **options)

    run.environment.advance = sometimes
    await run.run()
    masked = run.recorder.of("samples", status="masked")
    assert masked
    assert {row["failure_message"] for row in masked} == {"KeyError: 'numbers'"}
    assert run.status.num_masked_samples == len(masked)
    assert run.orchestrator.ledger.dropped["all_masked"] == len(run.recorder.of("groups", reason="all_masked"))


async def test_a_run_that_its_error_budget_ended_continues_once_the_environment_works():
    config = config_of(number_of_steps=6, group_size=1, environment_error_budget=0.1)
    run = InMemoryRun(config)
    advance, calls = run.environment.advance, itertools.count()

    async def failing_from_step_2_on(*arguments: Any, **options: Any) -> object:
        if len(run.trainer.steps) < 2:
            return await advance(*arguments, **options)
        raise EnvironmentFailure("the judge is down")

    run.environment.advance = failing_from_step_2_on
    with pytest.raises(RunError, match="the judge is down"):
        await run.run()
    state = RunState.load_state_dict(run.orchestrator.run_state().state_dict())
    assert all(group.usable_samples for group in state.groups), "a group of failures would be trained"
    resumed = InMemoryRun(config, start=state)
    advance = resumed.environment.advance

    async def failing_once(*arguments: Any, **options: Any) -> object:
        if next(calls) == 1:
            raise EnvironmentFailure("a page was not found")
        return await advance(*arguments, **options)

    resumed.environment.advance = failing_once
    await resumed.run()
    assert resumed.status.step == 6


async def test_a_server_that_comes_up_wakes_a_run_that_has_nothing_else_to_wait_for():
    run = InMemoryRun(config_of())
    run.slots.set_up(0, False)
    running = asyncio.create_task(run.run())
    await tick(50)
    assert not run.engine.requests
    run.slots.set_up(0, True)
    await running
    assert len(run.trainer.steps) == 3


@pytest.mark.parametrize("scaled", [True, False])
async def test_rewards_are_scaled_for_training_only_if_configured(scaled, monkeypatch):
    seen: set[float] = set()

    def advantages(samples: list[TrainSample], *arguments: object) -> list[float]:
        seen.update(sample.reward for sample in samples)
        return [0.0] * len(samples)

    monkeypatch.setattr("telescope.orchestrator.groups.compute_advantages", advantages)
    entry = {"name": "arithmetic", "reward_min": -1.0, "reward_max": 3.0}
    run = InMemoryRun(config_of(environments=[entry], normalize_rewards=scaled))
    await run.run()
    assert seen == ({0.25, 0.5} if scaled else {0.0, 1.0})
    recorded = {row["reward"] for row in run.recorder.of("samples", status="kept")}
    assert recorded == {0.0, 1.0}, "the record has the environment's rewards"


@pytest.mark.parametrize("how", ["a stop", "a failure"])
async def test_what_is_open_when_a_run_ends_is_on_record_as_cancelled(how):
    run = InMemoryRun(config_of(number_of_steps=100, max_async_rollout=3))
    train_step = run.trainer.train_step

    async def end_at_the_third(inputs: list[StepInput]) -> StepResult:
        if len(run.trainer.steps) == 2:
            if how == "a failure":
                raise ArithmeticError("the trainer failed")
            run.orchestrator.request_stop()
        return await train_step(inputs)

    run.trainer.train_step = end_at_the_third  # type: ignore[method-assign]
    supervisor = Supervisor()

    async def train_and_save() -> None:
        await run.orchestrator.run(supervisor)
        await asyncio.sleep(0.05)  # a checkpoint, while cancelled samples end

    with pytest.raises(ArithmeticError) if how == "a failure" else contextlib.nullcontext():
        await supervisor.run_until(train_and_save())
    groups, ledger = run.recorder.of("groups"), run.orchestrator.ledger
    assert len({row["group_id"] for row in groups}) == len(groups) == ledger.num_opened
    cancelled = run.recorder.of("groups", status="cancelled")
    assert {row["group_id"] for row in cancelled} == ledger.open
    assert cancelled and all(
        (row["reason"], row["step"]) == ("run_ended", ledger.num_trained // 2) for row in cancelled
    )
    samples = run.recorder.of("samples")
    assert len({row["sample_id"] for row in samples}) == len(samples) == 2 * len(groups)
    assert {row["group_id"] for row in run.recorder.of("samples", status="cancelled")} == ledger.open
    assert run.recorder.in_flight[-1] == []
