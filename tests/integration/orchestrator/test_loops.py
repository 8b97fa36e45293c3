"""The loops against a fake engine: trained samples, masked samples, and ends of runs."""

import asyncio
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngineSettings
from tests.fakes.run import FakeTrainer
from tests.integration.orchestrator.harness import Harness, harness

from telescope.orchestrator import orchestrator
from telescope.record.reader import Run

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOW = FakeEngineSettings(mean_tokens=12, length_sigma=0.6, tokens_per_second=400, vocabulary=300, end_token=None)


async def step_reached(run: Harness, step: int) -> None:
    """Return once so many steps have ended."""
    while run.status.step < step:  # noqa: ASYNC110  # a run sends no notification
        await asyncio.sleep(0.005)


def greatest_staleness(run_dir: Path) -> list[float]:
    """Return the age of the oldest sample of each step."""
    return [dict(metrics)["staleness/steps/max"] for metrics in Run(run_dir).table("steps")["metrics"].to_pylist()]


async def test_a_run_trains_every_step_and_accounts_for_every_prompt(ground, tmp_path):
    async with harness(ground, tmp_path) as run:
        await run.run()
        ledger = run.orchestrator.ledger
        assert len(run.trainer.steps) == 5
        assert ledger.num_trained == 5 * 4
        assert ledger.is_balanced()
        assert set(ledger.dropped) <= {"zero_advantage"}
    record = Run(tmp_path)
    steps = record.table("steps").to_pylist()
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    assert [row["learning_rate"] for row in steps] == [1e-6] * 5
    kept = [row for row in record.table("samples").to_pylist() if row["status"] == "kept"]
    assert len(kept) == 5 * 4 * 4
    assert {row["step"] for row in kept} == {0, 1, 2, 3, 4}


async def test_synchronous_mode_trains_only_on_samples_of_the_newest_weights(ground, tmp_path):
    async with harness(ground, tmp_path, engine=SLOW, max_async_rollout=0) as run:
        await run.run()
        assert [run.trainer.oldest_version(step) for step in range(5)] == [0, 1, 2, 3, 4]
    assert set(greatest_staleness(tmp_path)) == {0}


async def test_two_synchronous_runs_with_one_seed_train_the_same_samples(ground, tmp_path):
    seen = []
    for name in ("one", "two"):
        async with harness(ground, tmp_path / name, engine=SLOW, max_async_rollout=0, seed=7) as run:
            await run.run()
            batches = [
                b for step in run.trainer.steps for rank in step for m in rank.minibatches for b in m.micro_batches
            ]
            seen.append([(b.sample_ids, b.token_ids_T.tolist(), b.advantage_T.tolist()) for b in batches])
    assert seen[0] == seen[1]


async def test_generation_continues_while_the_trainer_works(ground, tmp_path):
    async with harness(
        ground, tmp_path, engine=SLOW, trainer=FakeTrainer(seconds=0.3), max_async_rollout=2, number_of_steps=6
    ) as run:
        await run.run()
    assert 1 <= max(greatest_staleness(tmp_path)) <= 2 + 1


async def test_groups_with_equal_rewards_are_replaced_and_only_such_groups_stop_the_run(ground, tmp_path):
    async with harness(ground, tmp_path, environment={"always": 1.0}) as run:
        with pytest.raises(RuntimeError, match=r"40 consecutive groups .*40 all positive"):
            await run.run()
        # Groups that finish in the same moment as the fortieth are still counted.
        assert set(run.orchestrator.ledger.dropped) == {"zero_advantage"}
        assert 40 <= sum(run.orchestrator.ledger.dropped.values()) <= run.orchestrator.ledger.num_opened
        assert run.orchestrator.ledger.is_balanced()
        assert not run.trainer.steps


async def test_equal_rewards_are_trained_if_configured(ground, tmp_path):
    async with harness(ground, tmp_path, environment={"always": 1.0}, discard_group_zero_advantage=False) as run:
        await run.run()
        assert run.orchestrator.ledger.num_trained == 20


async def test_an_environment_failure_masks_its_sample_and_nothing_else(ground, tmp_path):
    environment = {"fault": "raise", "fault_every": 16, "num_samples": 16}
    async with harness(ground, tmp_path, environment=environment, environment_error_budget=0.9) as run:
        await run.run()
        assert run.status.num_masked_samples > 0
        trained = [sample for step in range(5) for sample in run.trainer.sample_ids(step)]
    record = {row["sample_id"]: row for row in Run(tmp_path).table("samples").to_pylist()}
    assert all(record[sample]["reward"] is not None for sample in trained)
    masked = [row for row in record.values() if row["status"] == "masked"]
    assert masked
    assert all(row["failure_kind"] == "environment" and row["reward"] is None for row in masked)


async def test_a_reward_that_never_returns_is_masked_while_the_run_continues(ground, tmp_path):
    async with harness(
        ground, tmp_path, environment={"fault": "hang", "fault_every": 16, "num_samples": 16},
        environment_timeout_seconds=0.5, number_of_steps=4, environment_error_budget=0.9,
    ) as run:  # fmt: skip
        await run.run()
        assert len(run.trainer.steps) == 4
        assert run.worker.num_restarts > 0


async def test_an_engine_that_exits_is_restarted_and_its_samples_are_retried(ground, tmp_path):
    async with harness(ground, tmp_path, engine=SLOW, number_of_steps=8) as run:

        async def kill_twice() -> None:
            for step in (1, 4):
                await step_reached(run, step)
                await run.handles[0].kill()

        killing = asyncio.create_task(kill_twice())
        await run.run()
        await killing
        assert run.orchestrator.ledger.num_trained == 8 * 4
        assert run.status.num_masked_samples == 0
        assert run.handles[0].restarts == 2


@pytest.mark.parametrize("loop", ["_prompt_loop", "_dispatch_loop", "_sample", "_batch_loop", "_train_loop", "sync"])
async def test_an_exception_in_any_loop_ends_the_run_with_that_exception(loop, ground, tmp_path, monkeypatch):
    async with harness(ground, tmp_path) as run:
        target = {
            "_prompt_loop": (run.environments, "prepare"),
            "_dispatch_loop": (run.orchestrator, "_open_group"),
            "_sample": (run.environments, "roll_out"),
            "_batch_loop": (orchestrator, "form_batch"),
            "_train_loop": (run.trainer, "train_step"),
            "sync": (run.weights, "sync"),
        }[loop]

        def boom(*arguments: object, **options: object) -> None:
            raise ArithmeticError(f"thrown in {loop}")

        monkeypatch.setattr(*target, boom)
        with pytest.raises(ArithmeticError, match=loop):
            await run.run()


async def test_a_stop_request_ends_the_run_after_the_current_step(ground, tmp_path):
    async with harness(ground, tmp_path, number_of_steps=1000, trainer=FakeTrainer(seconds=0.05)) as run:

        async def stop() -> None:
            await step_reached(run, 2)
            run.orchestrator.request_stop()

        stopping = asyncio.create_task(stop())
        await run.run()
        await stopping
        assert 2 <= len(run.trainer.steps) <= 4
        assert run.orchestrator.ledger.is_balanced()


async def test_running_samples_are_visible_while_the_run_is_live(ground, tmp_path):
    very_slow = FakeEngineSettings(mean_tokens=12, tokens_per_second=8, vocabulary=300, end_token=None)
    async with harness(ground, tmp_path, engine=very_slow, number_of_steps=2) as run:
        seen: set[str] = set()

        async def look() -> None:
            while True:
                seen.update(row["sample_id"] for row in Run(tmp_path).in_flight().to_pylist())
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        await run.run()
        looking.cancel()
    trained = {row["sample_id"] for row in Run(tmp_path).table("samples").to_pylist()}
    assert seen & trained
