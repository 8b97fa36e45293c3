"""The calculator agent: which rollouts earn its reward, and which do not."""

from functools import cache

import pytest
from tests.unit.environments.turns import play as play_turns
from tests.unit.environments.turns import step

from telescope.environments.calculator_agent.questions import (
    Question,
    QuestionSettings,
    generate_questions,
    is_held_out,
)
from telescope.environments.records import conversation
from telescope.environments.registry import get_environment
from telescope.errors import UserError

QUESTION = Question((12, 7, 3), ("+", "*"))  # (12 + 7) * 3 = 57


def play(*completions, style="short", question=QUESTION, **kwargs):
    result, replies = result_of(*completions, style=style, question=question, **kwargs)
    return result.total_reward, result.sample_metrics, replies


make_environment = cache(get_environment)


def result_of(*completions, style="short", question=QUESTION, **kwargs):
    environment = make_environment("calculator_agent", prompt_style=style, **kwargs)
    state, replies = play_turns(environment, environment.sample_of(question), *completions)
    return environment.compute_reward(state), replies


@pytest.mark.parametrize(("style", "call"), [
    ("short", "<call>{}</call>"),
    ("full", '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{}"}}}}</tool_call>'),
])  # fmt: skip
def test_computing_step_by_step_is_rewarded_in_both_forms(style, call):
    reward, metrics, replies = play(call.format("12+7"), call.format("19 * 3"), "<answer>57</answer>", style=style)
    assert replies == [["19"], ["57"]]
    assert (reward, metrics["correct"], metrics["num_turns"], metrics["calculate_calls"]) == (1.0, 1.0, 3.0, 2.0)


@pytest.mark.parametrize(("completions", "right"), [
    (("<call>12+7</call>", "<call>19*3</call>", "<answer>57</answer>"), [1.0, 1.0, 1.0]),
    (("<call>19*3</call>", "<answer>57</answer>"), [0.0, 0.0, 0.0]),  # rewarded, and not what was due
    (("<call>12+7</call>", "<call>19*2</call>", "<answer>38</answer>"), [1.0, 0.0, 0.0]),
    (("<call>12+7</call><call>19*3</call>", "<answer>57</answer>"), [0.0, 0.0, 0.0]),
    (("<call>12+7</call>",), [1.0, 0.0, 0.0]),
])  # fmt: skip
def test_each_expected_turn_is_recorded_as_correct_or_not(completions, right):
    result, _ = result_of(*completions)
    assert [turn["correct"] for turn in result.info_turns] == right


@pytest.mark.parametrize("completions", [
    ("<answer>57</answer>",),  # without the calculator
    ("12+7*3",),  # the prompt, echoed
    ("<answer>12+7*3</answer>",),
    ("<call>12+7*3</call>", "<answer>57</answer>"),  # more than the calculator takes
    ("<call>19*3</call>", "<answer>57</answer><answer>58</answer>"),
    ("<call>19*3</call>", "<answer>57"),
    ("<call>19*3</call>", "<answer>57 or 58</answer>"),
    ("<call>19*3</call>", "<answer>57.0</answer>"),
    ("<call>19*3</call>", "<answer>\u0665\u0667</answer>"),
    ("<call>19*3</call>", "<answer>\uff15\uff17</answer>"),
    ("<call>\uff11\uff19*3</call>", "<answer>57</answer>"),
    ("<call>19*3</call>", "<answer>" + "9" * 5000 + "</answer>"),
    ("<call>19*3</call>", "<think><answer>57</answer></think>"),
    ("<call>9**9**9</call>", "<answer>57</answer>"),
    ("<call>9e9*9</call>", "<answer>57</answer>"),
    ("<call>__import__('os')</call>", "<answer>57</answer>"),
    ("<call>57/0</call>", "<answer>57</answer>"),
    ("<call></call>", "<answer>57</answer>"),
    ("<call>999999999*999999999</call>", "<answer>57</answer>"),
    ("<call>57</call>", "<answer>57</answer>"),  # no operation
    ("<call>12+7</call>", "<call>19*3</call><answer>57</answer>"),  # never came to an answer
    ("<call>19*3</call>",) * 10,
    ("call>19*3</call>", "<answer>57</answer>"),
])  # fmt: skip
def test_an_answer_without_the_calculator_or_of_another_form_earns_nothing(completions):
    reward, metrics, _ = play(*completions)
    assert (reward, metrics["correct"]) == (0.0, 0.0)


def test_an_answer_that_was_cut_off_is_not_final():
    environment = get_environment("calculator_agent", prompt_style="short")
    state, _ = play_turns(environment, environment.sample_of(QUESTION), "<call>12+7</call>", "<call>19*3</call>")
    state.trajectory.append(step("<answer>57</answer>", is_truncated=True))
    state.stop_reason = "final_answer"
    assert environment.compute_reward(state).total_reward == 0.0


def test_a_right_answer_without_the_calculator_may_earn_a_configured_reward():
    assert play("<answer>57</answer>", answer_reward=0.25)[0] == 0.25
    assert play("<answer>58</answer>", answer_reward=0.25)[0] == 0.0


@pytest.mark.parametrize(
    "call", ["<call>19*</call>", "<call>x</call>", "<call>19*3", "19*3</call>", "<call>1/0</call>"]
)
def test_a_failed_call_gets_one_word_and_is_not_an_answer(call):
    _, metrics, replies = play(call, "<call>19*3</call>")
    assert replies == [["error"], ["57"]]
    assert (metrics["tool_error_count"], metrics["tool_success_count"]) == (1.0, 1.0)


def test_results_of_rollouts_are_separate():
    environment = get_environment("calculator_agent", prompt_style="short")
    states = [environment.create_initial_state(environment.sample_of(QUESTION)) for _ in range(2)]
    states[0].trajectory.append(step("<call>19*3</call>"))
    environment.env_response(conversation(states[0]), states[0])
    states[1].trajectory.append(step("<answer>57</answer>"))
    states[1].stop_reason = "final_answer"
    assert environment.compute_reward(states[1]).total_reward == 0.0


@pytest.mark.timeout(600)
def test_questions_are_solvable_distinct_and_follow_from_the_seed():
    settings = QuestionSettings(1, 4, 99)
    first, again = ([q for q, _ in zip(generate_questions(settings, 1), range(500), strict=False)] for _ in range(2))
    assert first == again and len(set(first)) == 500
    for question in first:
        assert all(0 <= value <= 999_999_999 for _, value in question.steps)
        assert play(*(f"<call>{expression}</call>" for expression, _ in question.steps),
                    f"<answer>{question.answer}</answer>", question=question)[0] == 1.0  # fmt: skip


def test_held_out_questions_are_never_trained_on():
    texts = {
        portion: {s.metadata["question"] for s in get_environment("calculator_agent", portion=portion)._loaded()}
        for portion in ("train", "heldout")
    }
    assert texts["train"] and texts["heldout"] and not texts["train"] & texts["heldout"]
    assert not is_held_out(Question((1, 2), ("+",))) or "1+2" not in texts["train"]


def test_settings_without_questions_are_refused():
    for kwargs, words in (
        ({"portion": "test"}, 'portion is "test"'),
        ({"operations": "/"}, "operations is '/'"),
        ({"min_operations": 3}, "min_operations is 3"),
        ({"max_number": 1, "max_operations": 1, "num_samples": 500}, "only 3 different questions"),
    ):
        with pytest.raises(UserError, match=words):
            get_environment("calculator_agent", **kwargs).get_sample(0)
