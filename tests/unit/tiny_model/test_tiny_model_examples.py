"""Warm-start examples of Countdown: the environment's prompts and rewards, no held-out puzzle."""

import pytest

from telescope.environments.base import Sample
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import is_held_out
from telescope.tiny_model.build import build_tokenizer, encode_examples
from telescope.tiny_model.cache import TinyModelSettings
from telescope.tiny_model.examples import Example, ExampleSource, countdown_arguments

SETTINGS = TinyModelSettings()
SERIES = TinyModelSettings(num_turns=2)


def read(question: str) -> tuple[list[int], int]:
    numbers, target = question.split(" -> ")
    return [int(number) for number in numbers.split()], int(target)


def judge(examples: list[Example], settings: TinyModelSettings = SETTINGS) -> list[dict[str, float]]:
    environment = CountdownEnvironment(**countdown_arguments(settings))
    metrics = []
    for turn in (turn for example in examples for turn in example):
        question = turn.messages[-1]["content"]
        numbers, target = read(question)
        sample = Sample(question, str(target), {"numbers": numbers, "target": target})
        metrics.append(environment.compute_reward(turn.answer, sample).sample_metrics)
    return metrics


@pytest.mark.parametrize("settings", [SETTINGS, TinyModelSettings(num_numbers=5, max_number=99), SERIES])
def test_right_answers_are_right(settings):
    source = ExampleSource(settings)
    metrics = judge([source.draw(0.0) for _ in range(100)], settings)
    assert all(metric == {"correct": 1.0, "format": 1.0} for metric in metrics)


def test_arbitrary_answers_keep_the_form_and_are_mostly_wrong():
    source = ExampleSource(SETTINGS)
    metrics = judge([source.draw(1.0) for _ in range(300)])
    assert all(metric["format"] == 1.0 for metric in metrics)
    assert 0.02 < sum(metric["correct"] for metric in metrics) / len(metrics) < 0.4


def test_held_out_puzzles_never_occur():
    source = ExampleSource(SERIES)
    turns = [turn for _ in range(1000) for turn in source.draw(0.0)]
    assert not any(is_held_out(*read(turn.messages[-1]["content"])) for turn in turns)


def test_a_puzzle_always_has_the_same_right_answer():
    source = ExampleSource(SETTINGS)
    answers: dict[str, set[str]] = {}
    for _ in range(3000):
        (turn,) = source.draw(0.0)
        answers.setdefault(turn.messages[-1]["content"], set()).add(turn.answer)
    assert all(len(found) == 1 for found in answers.values())


def test_examples_follow_from_the_seed():
    first, again, other = (ExampleSource(TinyModelSettings(seed=seed)) for seed in (1, 1, 2))
    drawn = [[source.draw(0.5) for _ in range(50)] for source in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_are_those_that_the_environment_renders():
    tokenizer = build_tokenizer(["3 7 12 -> 22"], 384)
    environment = CountdownEnvironment(**countdown_arguments(SETTINGS), portion="train", num_samples=20)
    rendered = {environment.get_sample(i).prompt: environment.format_prompt(environment.get_sample(i).prompt, tokenizer)
                for i in range(20)}  # fmt: skip
    source, seen = ExampleSource(SETTINGS), 0
    for _ in range(5000):
        (turn,) = source.draw(0.0)
        if (question := turn.messages[-1]["content"]) in rendered:
            seen += 1
            text = tokenizer.apply_chat_template(turn.messages, tokenize=False, add_generation_prompt=True)
            assert text == rendered[question]
    assert seen


def test_later_puzzles_of_a_conversation_are_put_by_the_user_or_by_a_tool():
    source = ExampleSource(TinyModelSettings(num_turns=3))
    roles = {tuple(turn.messages[-1]["role"] for turn in source.draw(0.0)) for _ in range(50)}
    assert roles == {("user", "user", "user"), ("user", "tool", "tool")}


@pytest.mark.parametrize("settings", [SETTINGS, SERIES])
def test_only_the_answers_and_their_end_tokens_are_trained(settings):
    tokenizer = build_tokenizer(["3 7 12 -> 22"], 384)
    source = ExampleSource(settings)
    examples = [source.draw(0.0) for _ in range(16)]
    tokens_BL, targets_BL = encode_examples(examples, tokenizer)
    assert tokens_BL.shape == targets_BL.shape
    for example, tokens_L, targets_L in zip(examples, tokens_BL, targets_BL, strict=True):
        trained_L = targets_L != -100
        written = "".join(turn.answer + "<|im_end|>" for turn in example)
        assert tokenizer.decode(targets_L[trained_L]) == written
        following = trained_L.nonzero()[:, 0] + 1
        assert (tokens_L[following] == targets_L[trained_L]).all()


def test_a_conversation_of_several_turns_is_written_as_the_template_writes_it():
    tokenizer = build_tokenizer(["3 7 12 -> 22"], 384)
    example = ExampleSource(SERIES).draw(0.0)
    turns = [(*turn.messages, {"role": "assistant", "content": turn.answer}) for turn in example]
    (tokens_L,), _ = encode_examples([example], tokenizer)
    written = tokenizer.apply_chat_template([message for turn in turns for message in turn], return_dict=False)
    assert tokens_L.tolist() == written[:-1], "all but the last newline"
