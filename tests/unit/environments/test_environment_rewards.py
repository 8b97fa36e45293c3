"""Rewards built from functions."""

import asyncio

import pytest

from telescope.environments.base import RolloutState, Sample
from telescope.environments.rewards import Rubric
from telescope.environments.user_code import call_with_declared
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


async def test_total_is_the_weighted_sum_and_metrics_are_the_returned_values():
    result = await score(Rubric().add_reward(correct, weight=3.0).add_reward(later, weight=-0.5).add_metric(length))
    assert result.total_reward == 3.0 * 1.0 - 0.5 * 2.0
    assert result.sample_metrics == {"correct": 1.0, "later": 2.0, "length": 1.0}
    rubric = Rubric()
    for weight in (0.7, 0.2, 0.1):
        rubric.add_reward(lambda: 1.0, weight, name=str(weight))
    assert (await score(rubric)).total_reward == 1.0, "weights that add up to one give a full reward of one"


async def test_functions_receive_only_what_they_declare():
    seen = {}

    def everything(**arguments):
        seen.update(arguments)
        return 0

    state = RolloutState(SAMPLE, "x")
    rubric = Rubric().add_reward(length).add_reward(everything).add_reward(lambda state: state.num_turns, name="turns")
    await score(rubric, state=state, eos_token="<eos>")
    assert seen == {"completion": "4", "sample": SAMPLE, "state": state, "eos_token": "<eos>"}
    columns = {"function": 1, "positional": 2}  # names of parameters of what calls it
    assert call_with_declared(lambda **columns: columns, **columns) == columns
    with pytest.raises(UserError, match=r"'other' needs 'answer', but it can take completion, .* Take sample, "):
        rubric.add_reward(lambda answer, sample: 1.0, name="other")


async def test_ranges_describe_charts_and_never_change_a_reward():
    for options in ({"range_min": 0, "range_max": 4}, {"range_min": 6, "range_max": 10, "invert": True}, {}):
        rubric = Rubric().add_reward(length, weight=2.0, **options).add_metric(later, **options)
        result = await score(rubric, "12345")
        assert (result.total_reward, result.sample_metrics) == (10.0, {"length": 5.0, "later": 2.0})


async def test_golden_answers_come_from_the_sample_the_function_or_a_literal():
    rubric = Rubric()
    rubric.add_reward(correct, golden_answer="answer")
    rubric.add_metric(length, golden_answer="unit")
    rubric.add_metric(lambda: 0, name="literal", golden_answer="blue")
    rubric.add_metric(lambda: (0, "seven"), name="returned", golden_answer="answer")
    rubric.add_metric(lambda: (0, None), name="none")
    result = await score(rubric)
    assert result.golden_answers == {
        "correct": "4", "length": "apples", "literal": "blue", "returned": "seven", "none": None,
    }  # fmt: skip
    assert result.sample_metrics["returned"] == 0.0
    result = await Rubric().add_reward(lambda: 1.0, name="x", golden_answer="answer").score(completion="a")
    assert result.golden_answers == {"x": "answer"}, "a literal without a sample"
    rubric = Rubric().add_reward(lambda sample: float(sample is SAMPLE), name="same", golden_answer="answer")
    result = await rubric.score(state=RolloutState(SAMPLE, "x"))
    assert (result.total_reward, result.golden_answers) == (1.0, {"same": "4"}), "the sample of the state"


async def test_a_function_that_raises_is_a_failure_and_no_other_one_goes_on():
    ended = []

    async def broken():
        raise ZeroDivisionError

    async def go_on():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(ZeroDivisionError):
        await score(Rubric().add_reward(broken).add_reward(go_on))
    assert ended == [True]
    with pytest.raises(ZeroDivisionError):
        await score(Rubric().add_reward(lambda: 1.0, name="one").add_metric(lambda: 1 / 0, name="broken"))


async def test_extras_are_merged_into_the_result():
    rubric = Rubric().add_reward(correct, golden_answer="answer")
    extras = {"extra_golden_answers": {"unit": "apples"}, "extra_info_turns": [{"turn": 0}]}
    result = await score(rubric, extra_sample_metrics={"words": 1.0}, extra_sample_tags={"kind": "sum"}, **extras)
    assert result.sample_metrics == {"correct": 1.0, "words": 1.0}
    assert result.golden_answers == {"correct": "4", "unit": "apples"}
    assert (result.info_turns, result.sample_tags) == ([{"turn": 0}], {"kind": "sum"})


def test_ranges_are_declared_as_an_environment_has_them():
    rubric = Rubric().add_reward(correct, range_min=0.0, range_max=1.0).add_metric(length, range_min=0.0)
    rubric.add_metric(later)
    rubric.add_metric(lambda: 0, name="errors", range_min=0, range_max=9, invert=True)
    assert rubric.metrics_ranges == {
        "correct": {"min": 0.0, "max": 1.0}, "length": {"min": 0.0}, "errors": {"min": 0, "max": 9, "invert": True},
    }  # fmt: skip


async def test_two_functions_of_one_name_both_count_and_a_range_may_be_one_number():
    rubric = Rubric().add_reward(lambda: 1.0, name="x", range_min=1, range_max=1).add_reward(lambda: 2.0, 0.5, name="x")
    result = await score(rubric)
    assert (result.total_reward, result.sample_metrics) == (2.0, {"x": 2.0})
    assert rubric.metrics_ranges["x"] == {"min": 1, "max": 1}


async def test_invalid_rubrics_are_refused_by_name():
    rubric = Rubric()
    with pytest.raises(UserError, match="range_min 1, which is above range_max 0"):
        rubric.add_metric(length, range_min=1, range_max=0)
    rubric.add_metric(lambda: "high", name="word")
    with pytest.raises(TypeError, match="the result of the rubric's 'word' is str 'high', not a number"):
        await score(rubric)
