"""Countdown: its puzzles, its split and its reward."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.environments.fake_hub import serve_rows

from telescope.environments.base import Sample
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import PuzzleSettings, generate_puzzles, is_held_out, parse, solve
from telescope.environments.registry import get_environment
from telescope.environments.serialization import sample_uid
from telescope.errors import UnreachableError, UserError

SMALL = {"dataset": "generated", "max_numbers": 3, "max_number": 9, "operations": "+-", "max_target": 27}


def countdown(**kwargs):
    return CountdownEnvironment(**{"dataset": "generated", "num_samples": 50, **kwargs})


def puzzle(numbers, target):
    return Sample("", str(target), {"numbers": list(numbers), "target": target})


def metrics(completion, numbers=(3, 7, 12), target=22, **kwargs):
    return countdown(**kwargs).compute_reward(completion, puzzle(numbers, target)).sample_metrics


@pytest.mark.parametrize("seed", range(3))
def test_every_generated_puzzle_has_a_solution(seed):
    for numbers, target in islice(generate_puzzles(PuzzleSettings(), seed), 300):
        solution = parse(solve(numbers, target, "+-*/"))
        assert solution.value() == target
        assert sorted(solution.numbers) == sorted(numbers)
        assert 1 <= target <= 100


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["+", "+-", "+-*/", "*/"]))
def test_solutions_earn_the_full_reward(seed, operations):
    environment = countdown(operations=operations, prompt_style="short")
    for made in islice(generate_puzzles(PuzzleSettings(operations=operations), seed), 5):
        result = environment.compute_reward(environment.solution(puzzle(*made))[0], puzzle(*made))
        assert result.total_reward == environment.reward_max == 2.0


def test_dataset_is_a_function_of_the_seed_and_a_longer_one_begins_with_the_shorter_one():
    first, again, other = (countdown(seed=seed) for seed in (1, 1, 2))
    uids = [[sample_uid(environment.get_sample(i)) for i in range(50)] for environment in (first, again, other)]
    assert uids[0] == uids[1] != uids[2] and len(set(uids[0])) == 50
    short = countdown(num_samples=10, seed=1)
    assert [first.get_sample(i) for i in range(10)] == [short.get_sample(i) for i in range(10)]


def test_held_out_puzzles_are_in_no_training_set_for_any_seed():
    held_out = countdown(**SMALL, portion="heldout", num_samples=500, seed=7)
    train = countdown(**SMALL, portion="train", num_samples=1500, seed=8)
    shared = {sample_uid(held_out.get_sample(i)) for i in range(500)}
    shared &= {sample_uid(train.get_sample(i)) for i in range(1500)}
    assert shared == set()
    puzzles = [
        {(*sorted(sample.metadata["numbers"]), sample.metadata["target"]) for sample in environment._loaded()}
        for environment in (held_out, train)
    ]
    assert puzzles[0] & puzzles[1] == set()


@given(st.permutations([3, 7, 12, 5]), st.integers(1, 100))
def test_the_split_does_not_depend_on_the_order_of_the_numbers(numbers, target):
    assert is_held_out(numbers, target) == is_held_out([3, 5, 7, 12], target)


@pytest.mark.parametrize(("completion", "correct", "well_formed"), [
    ("<answer>3+7+12</answer>", 1, 1), ("I think.\n<answer> (12 + 7) + 3 </answer>\n", 1, 1),
    ("<think>12+12=24 <answer>1</answer></think><answer>3+7+12</answer>", 1, 1),
    ("still thinking</think><answer>3+7+12</answer>", 1, 1), ("<answer>3+7</answer>", 0, 1),
    ("<answer>3+7+12+0</answer>", 0, 1), ("<answer>7+7+3+3+2</answer>", 0, 1),
    ("<answer>12+7+7-7+3</answer>", 0, 1), ("<answer>22</answer>", 0, 1), ("<answer>3/(7-7)+12</answer>", 0, 1),
    ("<answer>3+7+12</answer> done", 1, 0), ("<answer>1+1</answer><answer>3+7+12</answer>", 1, 0),
    ("<answer>3+7+12</answer><answer>1+1</answer>", 0, 0), ("<answer>3+7+12=22</answer>", 0, 0),
    ("<answer>95**97**99</answer>", 0, 0), ("<answer>-3+7+12</answer>", 0, 0),
    ("<answer>" + "(" * 10_000 + "</answer>", 0, 0), ("<answer>3+7+12", 0, 0), ("3+7+12", 0, 0),
    ("</answer>3+7+12<answer>", 0, 0), ("<think><answer>3+7+12</answer>", 0, 0), ("", 0, 0),
])  # fmt: skip
def test_answers_are_judged_by_value_numbers_and_form(completion, correct, well_formed):
    assert metrics(completion) == {"correct": correct, "format": well_formed}


@pytest.mark.parametrize(("answer", "numbers", "target", "options", "correct"), [
    ("5+5+1", (5, 5, 1), 11, {}, 1), ("5+5+1", (5, 1, 1), 11, {}, 0),
    ("3*4", (3, 4), 12, {}, 1), ("3*4", (3, 4), 12, {"operations": "+-"}, 0),
])  # fmt: skip
def test_a_number_is_used_as_often_as_given_by_allowed_operations(answer, numbers, target, options, correct):
    found = metrics(f"<answer>{answer}</answer>", numbers, target, **options)
    assert found == {"correct": correct, "format": 1}


def test_weights_change_the_reward_and_not_the_metrics():
    environment = countdown(correct_reward=1.0, format_reward=0.1)
    result = environment.compute_reward("<answer>3+7</answer>", puzzle((3, 7, 12), 22))
    assert result.total_reward == pytest.approx(0.1)
    assert result.sample_metrics == {"correct": 0.0, "format": 1.0}
    assert (environment.reward_min, environment.reward_max) == (0.0, pytest.approx(1.1))
    ended = environment.compute_reward("<answer>3+7+12</answer><eos>", puzzle((3, 7, 12), 22), eos_token="<eos>")
    assert ended.sample_metrics == {"correct": 1.0, "format": 1.0}, "an end token keeps the form valid"


def test_short_prompts_are_bare_full_ones_explain_and_both_may_be_replaced():
    short = countdown(prompt_style="short")
    assert short.build_messages(short.question((3, 7, 12), 22)) == [{"role": "user", "content": "3 7 12 -> 22"}]
    system, user = countdown().build_messages(countdown().question((3, 7, 12), 22))
    assert system["role"] == "system"
    assert "Make 22 from the numbers 3, 7, 12." in user["content"] and "<answer>" in user["content"]
    bare = countdown(system_prompt=None, instruction_prompt=None)
    assert bare.build_messages("q") == [{"role": "user", "content": "q"}]
    own = countdown(prompt_style="short", system_prompt="S", instruction_prompt="I")
    assert [message["content"] for message in own.build_messages("q")] == ["S", "I\n\nq"]


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"prompt_style": "long"}, 'prompt_style is "long", but it must be one of "full", "short"'),
    ({"operations": "+^"}, "operations is"),
    ({"dataset": "local"}, 'dataset is "local", but it must be one of "auto", "hub", "generated"'),
    ({"portion": "test"}, 'portion is "test", but it must be one of "all", "train", "heldout"'),
    ({"min_numbers": 5}, "min_numbers is 5, above max_numbers"),
    ({"min_number": -1}, "min_number is -1, but it must be at least 0"),
    ({"num_samples": 10**6, **SMALL}, "Lower num_samples or widen"),
    ({"seeds": 3}, r"'seeds'\. Did you mean 'seed'\?"),
])  # fmt: skip
def test_invalid_arguments_name_the_field_the_value_and_the_fix(kwargs, words):
    with pytest.raises(UserError, match=words):
        len(get_environment("countdown", **{"dataset": "generated", **kwargs}))


def test_hub_rows_become_samples_of_the_portion(monkeypatch):
    serve_rows(monkeypatch, lambda *_: [{"nums": [n, n + 1, 2], "target": 2 * n + 3} for n in range(200)])
    held_out = CountdownEnvironment(dataset="hub", portion="heldout")
    train = CountdownEnvironment(dataset="hub", portion="train")
    assert len(held_out) + len(train) == 200
    assert 10 < len(held_out) < 90
    assert held_out.get_sample(0).metadata["target"] == int(held_out.get_sample(0).answer)
    assert len(CountdownEnvironment(dataset="hub", num_samples=7)) == 7


def test_generated_puzzles_replace_only_the_default_dataset(monkeypatch, caplog):
    serve_rows(monkeypatch, ConnectionError("no network"))
    assert len(CountdownEnvironment(num_samples=3)) == 3
    assert "is not available (ConnectionError: no network)" in caplog.text
    for kwargs in ({"dataset": "hub"}, {"dataset_name": "someone/puzzles"}, {"dataset_split": "test"}):
        with pytest.raises(UnreachableError, match=r"no network.*or set dataset: generated"):
            len(CountdownEnvironment(**kwargs))
