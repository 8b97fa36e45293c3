"""Groups: what counts as a sample, what counts as a learning signal, and when a run has none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import group

from telescope.orchestrator.groups import DiscardStreak

rewards = st.lists(st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), min_size=1, max_size=8)


@given(rewards)
def test_a_group_is_usable_if_its_scored_samples_differ_or_there_is_but_one(values: list[float | None]) -> None:
    scored = {index: value for index, value in enumerate(values) if value is not None}
    made = group(values)
    assert made.rewards_n.tolist() == list(scored.values())
    assert [sample.sample_index for sample in made.usable_samples] == list(scored)
    why = made.why_useless()
    if not scored:
        assert why == ("all_masked", None)
    elif len(scored) > 1 and len(set(scored.values())) == 1:
        assert why is not None
        assert why[0] == "zero_advantage"
    else:
        assert why is None


def test_samples_are_in_the_order_of_their_index() -> None:
    made = group([0.0, 1.0, 0.5])
    made.samples.reverse()
    assert made.rewards_n.tolist() == [0.0, 1.0, 0.5]
    assert made.training_rewards_n.tolist() == [0.0, 1.0, 0.5]
    for sample in made.samples:
        sample.training_reward = 10.0 * sample.total_reward
    assert made.training_rewards_n.tolist() == [0.0, 10.0, 5.0]


def test_a_group_is_finished_when_every_sample_is_there_masked_or_not() -> None:
    made = group([1.0, None])
    assert made.is_finished
    made.samples.pop()
    assert not made.is_finished


@pytest.mark.parametrize(("rewards", "kind"), [
    ([0.0, 0.0], "all_zero"), ([0.5, 0.5], "all_positive"), ([-1.0, -1.0], "all_negative"), ([0.0, 1.0], None),
])  # fmt: skip
def test_equal_rewards_are_classified_by_their_common_sign_before_they_are_scaled(
    rewards: list[float], kind: str | None
) -> None:
    made = group(rewards)
    for sample in made.samples:
        sample.training_reward = 0.25
    assert made.why_useless() == ("zero_advantage", kind)


def test_a_streak_of_discards_ends_at_its_limit_and_a_usable_group_resets_it() -> None:
    streak = DiscardStreak(limit=3)
    assert not streak.is_half_over
    for _ in range(2):
        streak.discarded("all_zero", np.zeros(4))
    assert not streak.is_over
    streak.usable()
    streak.discarded("all_zero", np.zeros(4))
    assert streak.is_half_over, "a warning is given long before the limit"
    streak.usable()
    for _ in range(2):
        streak.discarded("all_positive", np.ones(4))
    assert not streak.is_over
    streak.discarded("all_masked", np.array([]))
    assert streak.is_over
    streak.discarded("all_masked", np.array([]))
    assert not streak.is_over, "the diagnosis is given once, though groups finish together"
    streak.discarded("all_masked", np.array([]))
    streak.last_failure = "The judge is away.\nTraceback"
    assert "it failed, or a filter removed it. The last failure: The judge is away. The table" in streak.diagnosis(0)


def test_the_diagnosis_names_the_rewards_and_the_fix() -> None:
    streak = DiscardStreak(limit=3)
    for kind, value in (("all_zero", 0.0), ("all_positive", 2.0), ("all_positive", 1.0)):
        streak.discarded(kind, np.full(4, value))
    text, fix = streak.diagnosis(0), "discard_group_zero_advantage: false"
    for words in ("3 consecutive groups", "2 all positive, 1 all zero", "[0.0, 2.0, 1.0]", fix):
        assert words in text


def test_equal_rewards_after_a_training_step_are_blamed_on_training() -> None:
    streak = DiscardStreak(limit=3)
    streak.usable()
    streak.discarded("all_zero", np.zeros(4))
    before, after = streak.diagnosis(0), streak.diagnosis(1)
    assert "too hard" in before and "resume_from_checkpoint" not in before
    assert "learning_rate" in after and "resume_from_checkpoint" in after
    assert "too hard" not in after
