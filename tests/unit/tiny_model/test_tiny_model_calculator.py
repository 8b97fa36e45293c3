"""What the warm start shows for the calculator: turns that the environment rewards, and no held-out question."""

from __future__ import annotations

import pytest

from telescope.environments.base import TrajectoryStep, conversation
from telescope.environments.calculator_agent.environment import CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import Question, is_held_out
from telescope.environments.registry import get_environment
from telescope.errors import UserError
from telescope.tiny_model.calculator_examples import CalculatorExamples, calculator_arguments
from telescope.tiny_model.examples import examples_of, markup_of
from telescope.tiny_model.settings import TinyModelSettings
from telescope.tiny_model.tokenizer import build_tokenizer
from telescope.tiny_model.warm_start import encode_examples

SETTINGS = TinyModelSettings(task="calculator_agent")


def question_in(text: str) -> Question:
    numbers = text.replace("+", " ").replace("-", " ").replace("*", " ").split()
    return Question(tuple(map(int, numbers)), tuple(character for character in text if character in "+-*"))


def test_right_turns_played_one_after_the_other_are_rewarded():
    source = CalculatorExamples(SETTINGS)
    taught: dict[str, dict[int, str]] = {}
    for _ in range(3000):
        example = source.draw(0.0)
        taught.setdefault(example.messages[0]["content"], {})[len(example.messages)] = example.answer
    environment = CalculatorAgentEnvironment(prompt_style="short")
    played = 0
    for text, turns in taught.items():
        question = question_in(text)
        assert not is_held_out(question)
        if len(turns) < len(question.operators) + 1:
            continue  # not every turn of it was drawn
        played += 1
        state = environment.create_initial_state(environment.sample_of(question))
        prompt = environment.get_initial_prompt(state.sample)
        while True:
            state.trajectory.append(TrajectoryStep(prompt, turns[len(prompt)]))
            done, state.stop_reason = environment.is_done(state)
            if done:
                break
            response = environment.env_response(conversation(state), state)
            prompt = environment.get_next_prompt_messages(state, response)
        assert environment.compute_reward(state).total_reward == 1.0
    assert played > 20


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.0), (0.7, 0.12, 0.28), (1.0, 0.2, 0.4)])
def test_a_turn_goes_wrong_as_often_as_it_is_meant_to(share, low, high):
    right, arbitrary = CalculatorExamples(SETTINGS), CalculatorExamples(SETTINGS)
    answers = {(str(e.messages), e.answer) for e in (right.draw(0.0) for _ in range(4000))}
    known = {messages for messages, _ in answers}
    drawn = [arbitrary.draw(share) for _ in range(1000)]
    judged = [(str(e.messages), e.answer) in answers for e in drawn if str(e.messages) in known]
    assert len(judged) > 100
    assert low <= 1.0 - sum(judged) / len(judged) <= high


def test_examples_follow_from_the_seed_and_the_task():
    drawn = [
        [source.draw(0.5) for _ in range(50)]
        for source in (examples_of(TinyModelSettings(task="calculator_agent", seed=seed)) for seed in (1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert TinyModelSettings(task="calculator_agent").key != TinyModelSettings().key
    with pytest.raises(UserError, match="task is chess; use one of countdown, calculator_agent"):
        TinyModelSettings(task="chess")


def test_the_environment_asks_in_the_same_words():
    environment = get_environment("calculator_agent", **calculator_arguments(SETTINGS), portion="train", num_samples=50)
    source = CalculatorExamples(SETTINGS)
    shown = {source.draw(0.0).messages[0]["content"] for _ in range(5000)}
    asked = [environment.get_initial_prompt(environment.get_sample(i)) for i in range(50)]
    assert all(len(messages) == 1 for messages in asked)
    assert sum(messages[0]["content"] in shown for messages in asked) > 10


def test_a_call_is_a_few_tokens_and_only_the_answer_is_trained():
    source = CalculatorExamples(SETTINGS)
    examples = [source.draw(0.0) for _ in range(16)]
    corpus = [str(message["content"]) for example in examples for message in example.messages]
    tokenizer = build_tokenizer(corpus, 384, markup_of(SETTINGS))
    assert len(tokenizer("<call>12+7</call>")["input_ids"]) == 6
    tokens_BL, targets_BL = encode_examples(examples, tokenizer)
    for example, targets_L in zip(examples, targets_BL, strict=True):
        assert tokenizer.decode(targets_L[targets_L != -100]) == example.answer + "<|im_end|>"
    assert tokens_BL.shape[1] < 80
