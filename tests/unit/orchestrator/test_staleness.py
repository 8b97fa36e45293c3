"""Stale samples: their age, their abort in the engine, and their counts."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of, group, sample
from tests.unit.orchestrator.simulated_clock import run_simulated
from tests.unit.orchestrator.simulation import FATES, Pace, Simulation

from telescope.errors import RunError
from telescope.orchestrator.async_window import Staleness
from telescope.orchestrator.supervision import Supervisor

# Answers take 1 to 40 seconds and training steps 1, so many samples are too old after three steps.
SLOW_ANSWERS = Pace(tokens=(1, 400), score=(0.0, 0.2))


def simulated(pace: Pace, *, seed: int = 0, num_servers: int = 1, **fields: Any) -> Simulation:
    """A finished run with checked counts."""
    defaults: dict[str, Any] = {
        "max_tokens": 1000, "max_model_len": 4096, "seq_len": 4096, "number_of_steps": 12,
        "environment_error_budget": 1.0, "group_size": 3, "max_concurrent_prompts_per_server": 8,
    }  # fmt: skip
    simulation = Simulation(config_of(**{**defaults, **fields}), pace, seed=seed, num_servers=num_servers)
    run_simulated(simulation.run())
    return simulation


def total(simulation: Simulation, *names: str) -> float:
    return sum(metrics.get(name, 0.0) for metrics in simulation.recorder.step_metrics for name in names)


def test_a_group_is_as_old_as_its_oldest_trained_token() -> None:
    made = group([1.0, 0.0], version=4)
    made.samples[1] = sample(1, 0.0, lengths=(2, 2), version=3)
    assert made.oldest_version() == 3
    assert not Staleness(2).is_stale(made, 5)
    assert Staleness(2).is_stale(made, 6)


def test_masked_samples_and_groups_without_tokens_have_no_age() -> None:
    made = group([1.0, None], version=4)
    made.samples[1].turns[0].generation.version_spans = [(0, 0, 3)]
    assert made.oldest_version() == 4, "masked samples are not trained"
    assert group([1.0], lengths=(0,)).oldest_version() is None
    assert not Staleness(0).is_stale(group([1.0], lengths=(0,)), 100)


def test_minus_one_switches_staleness_off() -> None:
    assert not Staleness(-1).is_stale(group([1.0]), 10_000)
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=-1, max_async_rollout=6)
    assert run.orchestrator.ledger.num_requeued == 0
    assert max(age for step in run.trainer.ages for age in step) > 3


def test_no_token_is_trained_that_is_older_than_the_bound() -> None:
    for bound in (0, 1, 3):
        run = simulated(SLOW_ANSWERS, max_off_policy_steps=bound, max_async_rollout=6)
        assert run.orchestrator.ledger.num_requeued > 0, "the bound had an effect"


def test_a_cancelled_sample_is_aborted_in_the_engine_itself() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4)
    cancelled = run.recorder.of("samples", status="cancelled")
    assert cancelled
    aborted = {request.rsplit(".", 2)[0] for request in run.servers[0].aborted}
    assert {row["sample_id"] for row in cancelled if row["completion_tokens"]} <= aborted
    assert run.servers[0].engine.num_aborted >= len(aborted)


def test_a_sample_of_several_turns_ages_from_its_first_token() -> None:
    pace = Pace(tokens=(1, 30), turns=(1, 6), score=(0.0, 1.0))
    run = simulated(pace, max_off_policy_steps=2, max_async_rollout=6, number_of_steps=20)
    cancelled = run.recorder.of("samples", status="cancelled")
    assert any(row["num_turns"] > 1 and row["end_version"] > row["start_version"] for row in cancelled)
    kept = run.recorder.of("samples", status="kept")
    assert any(row["num_turns"] > 1 and row["end_version"] > row["start_version"] for row in kept)
    assert max(row["step"] - row["start_version"] for row in kept) <= 2


def test_every_prompt_is_trained_or_dropped_with_a_reason_or_still_open() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4)
    ledger = run.orchestrator.ledger
    assert ledger.num_requeued > 0
    fates = {row["group_id"]: (row["status"], row["reason"]) for row in run.recorder.of("groups")}
    assert set(fates) | ledger.open == set(range(ledger.num_opened)), "no prompt is missing after requeues"
    assert not set(fates) & ledger.open
    assert set(fates.values()) <= {("kept", None), ("discarded", "zero_advantage"), ("discarded", "too_slow")}
    returned = [row for row in run.recorder.of("groups", status="kept") if row["num_returns"]]
    assert returned, "a requeued prompt is trained in the end"


def test_a_prompt_is_dropped_as_too_slow_after_two_requeues() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4, number_of_steps=30)
    dropped = run.recorder.of("groups", reason="too_slow")
    assert dropped
    assert {row["num_returns"] for row in dropped} == {2}
    assert max(row["num_returns"] for row in run.recorder.of("groups")) == 2
    ids = {row["group_id"] for row in dropped}
    last = [row for row in run.recorder.of("samples") if row["group_id"] in ids and row["sample_id"].endswith("-r2")]
    assert {(row["status"], row["reason"]) for row in last} == {("cancelled", "too_slow"), ("discarded", "too_slow")}


def test_every_token_that_an_engine_sampled_is_on_record_whether_it_was_trained_or_aborted() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4, number_of_steps=30)
    rows = run.recorder.of("samples")
    assert {row["status"] for row in rows} >= {"kept", "discarded", "cancelled"}
    assert sum(row["completion_tokens"] for row in rows) == run.servers[0].engine.num_sampled_tokens


def test_every_sampled_token_is_counted_once_with_its_outcome() -> None:
    pace = Pace(
        tokens=(1, 200), score=(0.0, 0.2), turns=(1, 3), environment_failures=0.1, own_aborts=0.1,
        lost_conversations=0.1, deaths=((5.0, 0, 2.0), (20.0, 1, 2.0)),
    )  # fmt: skip
    run = simulated(pace, max_off_policy_steps=1, max_async_rollout=4, num_servers=2, inference_num_workers=2)
    tokens = {fate: total(run, f"{fate}/tokens") for fate in FATES}
    felt = ("kept", "discarded/max_async", "masked/environment", "cancelled", "retried", "lost")
    assert min(tokens[fate] for fate in felt) > 0, "`check` has compared the sums"
    assert total(run, "retried/unseen") > 0, "tokens lost with a server are counted as unseen"
    fates = FATES - {"retried", "lost"}
    written = [row for row in run.recorder.of("samples") if row["reason"] != "run_ended"]
    assert len(written) == total(run, *(f"{fate}/samples" for fate in fates))
    assert sum(row["completion_tokens"] for row in written) == sum(tokens[fate] for fate in fates)
    assert sum(row["wasted_tokens"] for row in written) <= tokens["retried"] + tokens["lost"]


def test_samples_of_requeued_prompts_are_counted() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4)
    assert total(run, "returned/groups") == run.orchestrator.ledger.num_requeued
    rows = [
        row
        for row in run.recorder.of("samples", reason="max_async")
        if row["group_id"] not in {group["group_id"] for group in run.recorder.of("groups", reason="too_slow")}
    ]
    assert 0 < len(rows) <= total(run, "returned/samples")
    assert sum(row["completion_tokens"] for row in rows) <= total(run, "returned/tokens")
    assert total(run, "returned/tokens") <= total(run, "discarded/max_async/tokens", "cancelled/tokens")
    assert any("returned/tokens_mean" in metrics for metrics in run.recorder.step_metrics)


def test_discarded_samples_are_counted_in_the_step_that_their_rows_have() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4)
    written = Counter(row["step"] for row in run.recorder.of("samples", status="discarded"))
    steps = run.recorder.of("steps")
    counted = {row["step"]: row["metrics"]["discarded/all/samples"] for row in steps}
    assert total(run, "discarded/max_async/samples") > 0
    assert counted == {row["step"]: written[row["step"]] for row in steps}


def test_lengths_are_reported_for_kept_and_dropped_samples() -> None:
    run = simulated(SLOW_ANSWERS, max_off_policy_steps=1, max_async_rollout=4)
    for name in ("mean", "std", "min", "max"):
        assert any(f"cancelled/tokens_{name}" in metrics for metrics in run.recorder.step_metrics)
        assert any(f"discarded/max_async/tokens_{name}" in metrics for metrics in run.recorder.step_metrics)
    lengths = {
        status: [row["completion_tokens"] for row in run.recorder.of("samples", status=status)]
        for status in ("kept", "cancelled")
    }
    mean = {status: sum(values) / len(values) for status, values in lengths.items()}
    assert mean["kept"] < 200, "dropping favors short answers (all: 200), and the metrics show by how much"


def test_many_prompts_are_requeued_only_if_the_age_bound_is_below_the_async_window() -> None:
    pace = Pace(tokens=(1, 40), train=(6.0, 6.0))
    shares = {}
    for bound in (1, 2, 3):
        run = simulated(pace, max_off_policy_steps=bound, max_async_rollout=2, max_concurrent_prompts_per_server=32)
        returned, kept = total(run, "returned/groups"), total(run, "kept/groups")
        shares[bound] = returned / (returned + kept)
    assert shares[1] > 0.2
    assert shares[2] < 0.05
    assert shares[3] == 0, "as the remark about max_off_policy_steps states"


def test_no_fresh_finished_group_is_discarded() -> None:
    run = simulated(Pace(), max_off_policy_steps=8, max_async_rollout=3)
    assert {row["reason"] for row in run.recorder.of("groups")} == {None, "zero_advantage"}
    assert run.orchestrator.ledger.num_requeued == 0
    late = simulated(SLOW_ANSWERS, max_off_policy_steps=2, max_async_rollout=4)
    for row in late.recorder.of("samples", reason="max_async", status="discarded"):
        others = [r for r in late.recorder.of("samples", reason="max_async") if r["group_id"] == row["group_id"]]
        assert max(other["age"] or 0 for other in others) > 2 or any(o["status"] == "cancelled" for o in others)


def test_a_waiting_batch_is_dissolved_when_it_becomes_too_old() -> None:
    run = simulated(Pace(train=(5.0, 5.0)), max_off_policy_steps=0, max_async_rollout=1)
    assert all(age == 0 for step in run.trainer.ages for age in step)
    assert run.orchestrator.ledger.num_requeued > 0


def test_a_run_whose_answers_are_all_too_slow_stops_with_the_reason() -> None:
    pace = Pace(tokens=(300, 300), tokens_per_second=1.0, train=(0.1, 0.1))
    lengths = {"max_tokens": 1000, "max_model_len": 4096, "seq_len": 4096}
    quick = config_of(number_of_steps=10_000, max_off_policy_steps=0, max_async_rollout=8, **lengths)
    simulation = Simulation(quick, pace)

    async def versions_move_on_without_a_batch() -> None:
        supervisor = Supervisor()

        async def sync() -> None:
            while True:
                await asyncio.sleep(1.0)
                await simulation.trainer.sync()
                simulation.orchestrator.version += 1
                simulation.orchestrator._withdraw_stale_groups()

        supervisor.spawn(sync(), "sync")
        await supervisor.run_until(simulation.orchestrator.run(supervisor))

    with pytest.raises(RunError, match=r"20 consecutive groups .*20 too slow.* Raise max_off_policy_steps"):
        run_simulated(versions_move_on_without_a_batch())
