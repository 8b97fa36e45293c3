"""Rewards put together from functions."""

import asyncio

import pytest

from telescope.environments.base import Sample
from telescope.environments.rewards import Rubric
from telescope.errors import UserError

SAMPLE = Sample("2 + 2", answer="4", metadata={"unit": "apples"})


def correct(completion, sample):
    return completion == sample.answer


def length(completion):
    return len(completion)


async def later(completion, bonus=2.0):
    await asyncio.sleep(0)
    return bonus


async def score(rubric, completion="4", **more):
    return await rubric.score(completion=completion, sample=SAMPLE, **more)


async def test_total_is_the_weighted_sum_and_metrics_are_what_the_functions_said():
    rubric = Rubric()
    rubric.add_reward(correct, weight=3.0)
    rubric.add_reward(later, weight=-0.5)
    rubric.add_metric(length)
    result = await score(rubric)
    assert result.total_reward == 3.0 * 1.0 - 0.5 * 2.0
    assert result.sample_metrics == {"correct": 1.0, "later": 2.0, "length": 1.0}


async def test_functions_receive_only_what_they_declare():
    seen = {}

    def everything(**arguments):
        seen.update(arguments)
        return 0

    rubric = Rubric()
    rubric.add_reward(length)
    rubric.add_reward(everything)
    await score(rubric, state="a state", eos_token="<eos>")
    assert set(seen) == {"completion", "sample", "state", "eos_token"}
    rubric.add_reward(lambda state: 1.0, name="of_the_state")
    with pytest.raises(TypeError, match="'of_the_state' asks for state, which was not given"):
        await score(rubric)


@pytest.mark.parametrize(
    ("options", "completion", "total"),
    [
        ({"range_min": 0, "range_max": 10}, "12345", 0.5),
        ({"range_min": 0, "range_max": 4}, "12345", 1.0),
        ({"range_min": 6, "range_max": 10}, "12345", 0.0),
        ({"range_min": 0, "range_max": 10, "invert": True}, "12", 0.8),
        ({"invert": True}, "12", -2.0),
        ({}, "12", 2.0),
    ],
)
async def test_values_are_mapped_from_their_range_and_clipped(options, completion, total):
    rubric = Rubric()
    rubric.add_reward(length, **options)
    result = await score(rubric, completion)
    assert result.total_reward == pytest.approx(total)
    assert result.sample_metrics["length"] == len(completion)


async def test_golden_answers_come_from_the_sample():
    rubric = Rubric()
    rubric.add_reward(correct, golden_answer="answer")
    rubric.add_metric(length, golden_answer="unit")
    rubric.add_metric(lambda: 0, name="none", golden_answer="colour")
    assert (await score(rubric)).golden_answers == {"correct": "4", "length": "apples", "none": None}


def test_ranges_are_declared_as_an_environment_has_them():
    rubric = Rubric()
    rubric.add_reward(correct, range_min=0.0, range_max=1.0)
    rubric.add_metric(length, range_min=0.0)
    rubric.add_metric(later)
    assert rubric.metrics_ranges == {"correct": {"min": 0.0, "max": 1.0}, "length": {"min": 0.0}}


async def test_mistakes_are_named():
    rubric = Rubric()
    rubric.add_reward(correct)
    with pytest.raises(UserError, match="two functions called 'correct'"):
        rubric.add_metric(correct)
    with pytest.raises(UserError, match="range_min 1, which is not below 0"):
        rubric.add_metric(length, range_min=1, range_max=0)
    rubric.add_metric(lambda: "high", name="word")
    with pytest.raises(TypeError, match="'word' returned 'high', not a number"):
        await score(rubric)
