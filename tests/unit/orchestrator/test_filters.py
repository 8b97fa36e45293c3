"""Sample filters, the overlong penalty, and the rewards that decide a group's learning signal."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.reference.rewards import overlong_penalty
from tests.unit.orchestrator.fakes import config_of, group, sample
from tests.unit.orchestrator.simulation import InMemoryRun

from telescope.environments.types import Advance, EnvironmentInfo, RewardRecord
from telescope.errors import ConfigError, RunError
from telescope.orchestrator.filters import SampleFilters, check_reward_ranges
from telescope.orchestrator.groups import form_batch
from telescope.orchestrator.record_rows import sample_row
from telescope.rollout.trajectory import Trajectory, Turn, compression_ratio


def filters(vocab_size: int = 1000, **fields: object) -> SampleFilters:
    return SampleFilters(config_of(**fields), vocab_size)


def with_text(text: str) -> Trajectory:
    made = sample()
    made.turns[0].text, made.compression_ratio = text, compression_ratio(text)
    return made


def removed_by(only: SampleFilters, made: Trajectory) -> str | None:
    """The filter that removes a sample."""
    only.apply(made)
    return made.filtered_by


def test_nothing_is_filtered_by_default() -> None:
    loop = with_text("the same again " * 1000)
    loop.turns[-1].generation.finish_reason = "length"
    loop.turns[-1].generation.logprobs_N[:] = -100.0
    loop.turns[-1].generation.token_ids_N[:] = 150_000
    filters().apply(loop)
    assert loop.filtered_by is None
    assert loop.penalty == 0.0
    assert loop.training_reward == loop.total_reward


def test_an_answer_that_was_cut_off_is_overlong() -> None:
    only = filters(filter_overlong=True)
    assert removed_by(only, sample(finish_reason="length")) == "overlong"
    assert removed_by(only, sample(finish_reason="stop")) is None


def test_a_text_that_compresses_too_well_is_repetition() -> None:
    only = filters(filter_repetition=True)
    prose = "It was the best of times, it was the worst of times, it was the age of wisdom, of foolishness."
    assert removed_by(only, with_text("wait, let me check. " * 200)) == "repetition"
    assert removed_by(only, with_text(prose)) is removed_by(only, with_text("")) is None
    strict = filters(filter_repetition=True, repetition_compression_threshold=1.1)
    assert removed_by(strict, with_text(prose)) == "repetition"
    assert 0.0 == compression_ratio("") < compression_ratio("a") < 1.0 < 100.0 < compression_ratio("ab" * 5000)


def test_a_rare_token_below_the_uniform_logprob_is_gibberish() -> None:
    bound = -math.log(1000) - 2.0
    only = filters(filter_gibberish=True, gibberish_token_threshold=101)

    def judged(token_id: int, logprob: float) -> str | None:
        made = sample(lengths=(2, 3))
        generation = made.turns[1].generation
        generation.token_ids_N = np.array([7, token_id, 7])
        generation.logprobs_N = np.array([-0.1, logprob, -0.1])
        return removed_by(only, made)

    assert judged(102, bound - 0.1) == "gibberish"
    assert judged(102, bound + 0.1) is None, "not improbable enough"
    assert judged(101, bound - 0.1) is None, "not above the threshold"


@pytest.mark.parametrize("lengths", [*((length,) for length in (0, 5, 11, 12, 13, 15, 16)), (9, 9), (14, 3)])
def test_the_overlong_penalty_is_that_of_dapo_for_the_longest_turn(lengths: tuple[int, ...]) -> None:
    only = filters(overlong_penalty_factor=0.5, overlong_buffer_tokens=4)
    made = sample(reward=3.0, lengths=lengths)
    only.apply(made, (0.0, 4.0))
    expected = pytest.approx(overlong_penalty(max(lengths), 16, 4, 0.5))
    assert only.overlong_penalty(made) == made.penalty == expected
    assert made.training_reward == 0.75 - made.penalty, "subtracted from the scaled reward"
    assert made.total_reward == 3.0


def test_equal_rewards_with_a_length_penalty_are_a_signal() -> None:
    equal = group([1.0, 1.0])
    equal.samples[1] = sample(1, 1.0, lengths=(16,))
    for settings, is_useless in (({}, True), ({"overlong_penalty_factor": 0.5}, False)):
        for made in equal.samples:
            filters(overlong_buffer_tokens=4, **settings).apply(made)
        assert (equal.why_useless() is not None) is is_useless
    batch = form_batch(config_of(advantage_norm="group", algorithm="dr_grpo"), [equal], 0, num_ranks=1)
    assert list(batch.advantages) == [0.25, -0.25]


def test_a_filtered_sample_is_in_no_statistic_of_its_group() -> None:
    found = group([0.0, 1.0, 5.0])
    found.samples[2].turns[-1].generation.finish_reason = "length"
    for made in found.samples:
        filters(filter_overlong=True).apply(made)
    batch = form_batch(config_of(algorithm="dr_grpo"), [found], 0, num_ranks=1)
    assert list(batch.advantages) == [-0.5, 0.5]
    trained = [i for mb in batch.inputs[0].minibatches for row in mb.micro_batches for i in row.sample_ids]
    assert sorted(trained) == ["5-0", "5-1"]


def test_the_row_of_a_filtered_sample_has_the_filter_and_the_reward() -> None:
    made = sample(reward=2.0, finish_reason="length")
    filters(filter_overlong=True, overlong_penalty_factor=1.0, overlong_buffer_tokens=16).apply(made)
    row = sample_row(made, "prompt", status="kept", reason=None, step=1)
    assert (row["status"], row["reason"], row["reward"], row["failure_kind"]) == ("masked", "overlong", 2.0, None)
    assert row["penalty"] == pytest.approx(3 / 16)


async def test_a_run_counts_filtered_samples_and_trains_on_the_rest() -> None:
    run = InMemoryRun(config_of(group_size=4, filter_repetition=True))
    advance = run.environment.advance

    async def sometimes_in_a_loop(key: str, index: int, turn: Turn, **options: bool):
        advanced = await advance(key, index, turn, **options)
        if turn.generation.token_ids_N[0] % 5 == 0:
            turn.text = "again and " * 500
        return advanced

    run.environment.advance = sometimes_in_a_loop
    await run.run()
    masked = run.recorder.of("samples", status="masked")
    assert masked
    assert {row["reason"] for row in masked} == {"repetition"}
    assert all(row["reward"] is not None and row["advantage"] is None for row in masked)
    counted = sum(metrics.get("masked/repetition/samples", 0.0) for metrics in run.recorder.step_metrics)
    assert counted == len(masked) == run.status.num_masked_samples
    ids = {row["sample_id"] for row in masked}
    assert not ids & {sample_id for step in run.trainer.steps for sample_id in step}


async def test_a_run_whose_samples_are_all_filtered_ends_with_the_reason() -> None:
    run = InMemoryRun(config_of(filter_repetition=True))

    async def loop(key: str, index: int, turn: Turn, **options: bool):
        turn.text = "again and " * 500
        return Advance([], RewardRecord(1.0, {}, {}, [], {}))

    run.environment.advance = loop
    with pytest.raises(RunError, match="a filter removed it"):
        await run.run()


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.0, None), (None, 1.0), (1.0, 1.0), (2.0, 1.0)])
def test_rewards_without_a_range_cannot_be_normalized(low: float | None, high: float | None) -> None:
    """Otherwise they would silently be compared unscaled with those of other environments."""
    infos = [EnvironmentInfo("arithmetic", 10, reward_min=low, reward_max=high)]
    check_reward_ranges(config_of(normalize_rewards=False), infos)
    with pytest.raises(ConfigError, match="environment 'arithmetic' has no valid reward range"):
        check_reward_ranges(config_of(normalize_rewards=True), infos)
    check_reward_ranges(config_of(normalize_rewards=True), [replace(infos[0], reward_min=0.0, reward_max=2.0)])
